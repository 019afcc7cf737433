"""A real tokenizer without a download: mistral-common's v3 SentencePiece model from its wheel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from alphamoe_tracers.errors import AlphaMoEError

NAME = "mistral-common v3"
VOCABULARY = 32_768


class ChatTokenizer:
    """Tokenises one user message with the chat template, and turns completions back into text."""

    def __init__(self) -> None:
        """Load the model from the wheel (about a second, most of it the import).

        Raises:
            AlphaMoEError: the package is missing, or its v3 model has another vocabulary than the presets count on.
        """
        try:
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
        except ImportError as error:
            raise AlphaMoEError(
                f"the tokenizer cannot be loaded: {error}", "pip install 'mistral-common[sentencepiece]'"
            ) from error
        self._tokenizer: Any = MistralTokenizer.v3()
        self._pieces: Any = self._tokenizer.instruct_tokenizer.tokenizer
        if self._pieces.n_words != VOCABULARY:
            raise AlphaMoEError(
                f"{NAME} has {self._pieces.n_words} words here, not {VOCABULARY}", "install the pinned mistral-common"
            )

    @property
    def eos_id(self) -> int:
        """Id of the end-of-sequence token."""
        return int(self._pieces.eos_id)

    def encode_chat(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a conversation of one user message, beginning-of-sequence included."""
        from mistral_common.protocol.instruct.messages import UserMessage
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        request: Any = ChatCompletionRequest(messages=[UserMessage(content=text)])
        return tuple(int(token) for token in self._tokenizer.encode_chat_completion(request).tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; an id beyond this vocabulary (a larger model's) is spelled ``<|40000|>``."""
        parts: list[str] = []
        for known, run in groupby(token_ids, key=lambda token: 0 <= token < VOCABULARY):
            if known:
                parts.append(str(self._tokenizer.decode(list(run))))
            else:
                parts.extend(f"<|{token}|>" for token in run)
        return "".join(parts)
