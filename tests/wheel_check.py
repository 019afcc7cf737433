"""Build the wheel, install it where the source cannot be seen, and use it as a user would.

Run by `make test` after pytest. The wheel is unpacked into a scratch folder that comes first on the path of an isolated
interpreter (`python -I`), in a working folder without a checkout, so that only packaged files can be imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "alphamoe_profiler",
    "alphamoe_tracers",
    "alphamoe_backend",
    "alphamoe_dashboards",
    "alphamoe_sanitizer_replays",
)
# -I ignores PYTHONPATH and the working folder, and dropping the editable install's finder hides the source.
BOOT = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__name__.lower()]
sys.path[:] = [{site!r}] + [p for p in sys.path if not p.startswith({root!r}) or 'site-packages' in p]
"""


def run_python(site: Path, work: Path, code: str, *, expect: int = 0) -> str:
    boot = BOOT.format(site=str(site), root=str(ROOT))
    finished = subprocess.run(
        [sys.executable, "-I", "-c", boot + code], cwd=work, capture_output=True, text=True, check=False, timeout=300
    )
    if finished.returncode != expect:
        sys.exit(f"exit {finished.returncode}, not {expect}, from:\n{code}\n{finished.stdout}\n{finished.stderr}")
    return finished.stdout


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="alphamoe-wheel-") as scratch:
        work = Path(scratch)
        env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1")
        subprocess.run(
            [sys.executable, "-m", "uv", "build", "-q", "--wheel", "--out-dir", scratch, str(ROOT)], check=True, env=env
        )
        (wheel,) = work.glob("*.whl")
        site = work / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
            names = archive.namelist()
        sources = {
            str(path.relative_to(folder.parent))
            for package in PACKAGES
            for folder in ROOT.glob(f"*/{package}")
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        missing = sorted(sources - set(names))
        if missing:
            sys.exit(f"the wheel lacks {missing}")
        stray = sorted(
            {name.split("/")[0] for name in names} - set(PACKAGES) - {f"{wheel.name.split('-py3')[0]}.dist-info"}
        )
        if stray:
            sys.exit(f"the wheel would put {stray} into site-packages")

        where = run_python(
            site, work, f"import importlib\nfor n in {PACKAGES!r}: print(importlib.import_module(n).__file__)"
        )
        outside = [line for line in where.split() if not line.startswith(str(site))]
        if outside:
            sys.exit(f"imported from the checkout, not from the wheel: {outside}")
        call = "from alphamoe_profiler.cli import main\nraise SystemExit(main({argv!r}))"
        run_python(site, work, call.format(argv=["--help"]))
        argv = ["--ranks", "2", "--device", "cpu", "--prompt", "text:Two and two?", "--max-new-tokens", "2"]
        script = "if __name__ == '__main__':\n    " + call.format(
            argv=[*argv, "--out", str(work / "run"), "--json", str(work / "run.json")]
        ).replace("\n", "\n    ")
        # Ranks are spawned, so the entry point has to be a file that they can import.
        entry = work / "entry.py"
        entry.write_text(BOOT.format(site=str(site), root=str(ROOT)) + script)
        finished = subprocess.run(
            [sys.executable, "-I", str(entry)], cwd=work, capture_output=True, text=True, check=False, timeout=300
        )
        if finished.returncode != 0:
            sys.exit(
                f"the traced run from the wheel ended with {finished.returncode}:\n{finished.stdout}{finished.stderr}"
            )
        verdict = json.loads((work / "run.json").read_text())["verdict"]
        if verdict != "INCONCLUSIVE":
            sys.exit(f"a run without a GPU must be INCONCLUSIVE, not {verdict}")
    print(f"wheel {wheel.name}: {len(names)} files, imports and a two-rank run work with the source hidden")


if __name__ == "__main__":
    main()
