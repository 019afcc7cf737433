"""Policies whose question is empty or contradictory: each problem is CONFIG_ERROR, and nothing is judged."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from alphamoe_profiler.policy import DispatchRule, ForbidRule, MSet, PlacedPolicy, Policy, RequireRule
from alphamoe_profiler.policy_match import Selector, compiled
from alphamoe_tracers.symbols import class_names, is_truncated


@dataclass(frozen=True)
class PlacedRule:
    """One rule about one symbol, with where it is written."""

    table: str
    """``require``, ``forbid`` or ``dispatch``."""
    rule: RequireRule | ForbidRule | DispatchRule
    selector: Selector
    line: int
    path: str | None
    told: str
    """The symbol as readers are told it: by the rule's name where it has one, else by the selector's."""
    title: str


@dataclass(frozen=True)
class Problem:
    """Why a policy cannot be answered."""

    text: str
    line: int
    path: str | None


def placed_rules(policies: tuple[PlacedPolicy, ...]) -> list[PlacedRule]:
    """Return the rules of policies, one for each symbol."""
    found = []
    for placed in policies:
        policy = placed.policy
        tables: dict[str, tuple[RequireRule | ForbidRule, ...]] = {"require": policy.require, "forbid": policy.forbid}
        for table, rules in tables.items():
            for index, rule in enumerate(rules):
                symbols = ((rule.symbol,) if rule.symbol is not None else ()) + rule.symbols
                for symbol in dict.fromkeys(symbols):
                    selector = Selector(symbol, rule.match, policy.classes)
                    told = rule.name if rule.name and len(symbols) == 1 else selector.told
                    title = told if table == "require" else f"no {told}"
                    found.append(PlacedRule(table, rule, selector, placed.line(table, index), placed.path, told, title))
        for index, dispatch in enumerate(policy.dispatch):
            told = dispatch.kernel or "any operator"
            title, line = dispatch.name or f"dispatch of {told}", placed.line("dispatch", index)
            found.append(PlacedRule("dispatch", dispatch, Selector(told, "base"), line, placed.path, told, title))
    return found


def policy_problems(policies: tuple[PlacedPolicy, ...], world_size: int, today: datetime.date) -> list[Problem]:
    """Say why policies cannot be answered, or nothing.

    Args:
        policies: those that are asked together.
        world_size: of the run.
        today: what expiry dates are compared with.
    """
    problems = []
    rules = placed_rules(policies)
    if not any(rule.table in ("require", "forbid") for rule in rules):
        first = policies[0] if policies else None
        line, path = (first.line("", 0), first.path) if first else (1, None)
        problems.append(Problem("the policy requires and forbids no symbol, so it can witness nothing", line, path))
    for placed in policies:
        for text, table, index in _of_policy(placed.policy, world_size, today, rules):
            problems.append(Problem(text, placed.line(table, index), placed.path))
    for rule in rules:
        problems += [Problem(f"{rule.title}: {text}", rule.line, rule.path) for text in _of_rule(rule)]
    problems += _contradictory(rules)
    return problems


def _of_policy(
    policy: Policy, world_size: int, today: datetime.date, rules: list[PlacedRule]
) -> Iterator[tuple[str, str, int]]:
    if policy.executions is not None and not policy.executions:
        yield "executions is empty, so nothing is asked", "", 0
    if not policy.purposes:
        yield "purposes is empty, so no step counts", "", 0
    tables: dict[str, tuple[RequireRule | ForbidRule | DispatchRule, ...]]
    tables = {"require": policy.require, "forbid": policy.forbid, "dispatch": policy.dispatch}
    for table, entries in tables.items():
        for index, rule in enumerate(entries):
            if not isinstance(rule, DispatchRule) and rule.symbol is None and not rule.symbols:
                yield f"[[{table}]] names no symbol", table, index
            if rule.executions is not None and not rule.executions:
                yield f"[[{table}]] executions is empty, so nothing is asked", table, index
            yield from ((f"[[{table}]] {text}", table, index) for text in _ranks(rule.ranks, world_size))
            if not isinstance(rule, ForbidRule) and rule.M is not None:
                yield from ((f"[[{table}]] M: {text}", table, index) for text in _m_set(rule.M))
    for index, own in enumerate(policy.classes):
        for pattern in (*own.base, *own.full):
            problem = _regex_problem(pattern)
            if problem:
                yield f"[[class]] {own.name}: {problem}", "class", index
        if not own.base and not own.full:
            yield f"[[class]] {own.name} has no pattern", "class", index
    for index, gap in enumerate(policy.known_gap):
        if gap.expires < today:
            yield f"[[known_gap]] {gap.symbol}: expired on {gap.expires}", "known_gap", index
        if not any(rule.selector.symbol == gap.symbol for rule in rules):
            yield f"[[known_gap]] {gap.symbol}: no rule is about this symbol", "known_gap", index
        if not gap.reason.strip():
            yield f"[[known_gap]] {gap.symbol}: it gives no reason", "known_gap", index
        yield from ((f"[[known_gap]] {text}", "known_gap", index) for text in _ranks(gap.ranks, world_size))


def _ranks(ranks: str | tuple[int, ...], world_size: int) -> Iterator[str]:
    if isinstance(ranks, str):
        return
    if not ranks:
        yield "ranks is empty, so nothing is asked"
    outside = sorted(rank for rank in ranks if rank >= world_size)
    if outside:
        yield f"rank {outside[0]} does not exist: the run has ranks 0 to {world_size - 1}"


def _m_set(asked: MSet) -> Iterator[str]:
    given = [values for values in (asked.exact, asked.within, asked.at_least) if values is not None]
    if not given:
        yield "give exact, within or at_least"
    if any(not values for values in given):
        yield "an empty set asks nothing"
    for low, high in asked.within or ():
        if low > high:
            yield f"the range {low} to {high} holds nothing"
    stated = {*(asked.exact or ()), *(asked.at_least or ())}
    if asked.within is not None and any(not _inside(value, asked.within) for value in stated):
        yield "a value that must be seen lies outside every range that is allowed"
    if asked.exact is not None and set(asked.at_least or ()) - set(asked.exact):
        yield "at_least names a value that is not in exact"


def _inside(value: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(low <= value <= high for low, high in ranges)


def _of_rule(placed: PlacedRule) -> Iterator[str]:
    rule, symbol = placed.rule, placed.selector.symbol
    if isinstance(rule, DispatchRule):
        if rule.exactly is not None and rule.exactly < rule.at_least:
            yield f"exactly {rule.exactly} and at_least {rule.at_least} contradict each other"
        return
    if is_truncated(symbol):
        yield "a name that ends in an ellipsis was cut by a tool: it can match nothing"
    if not symbol.strip():
        yield "a blank symbol can match nothing"
    if rule.match in ("base", "triton") and re.search(r"[<(\s]|::", symbol) and not symbol.startswith("operator"):
        yield 'can match nothing: a base name has no namespace, template arguments or parameters; use match = "full"'
    if rule.match == "regex":
        problem = _regex_problem(symbol)
        if problem:
            yield problem
    if rule.match == "class":
        yield from _class_problems(placed.selector)
    if isinstance(rule, RequireRule):
        if rule.exactly is not None and rule.exactly < rule.at_least:
            yield f"exactly {rule.exactly} and at_least {rule.at_least} contradict each other"
        if rule.equals_receipts and rule.match == "mangled":
            yield "receipts hold base names, which a mangled symbol cannot be compared with"
        if rule.purposes is not None and not rule.purposes:
            yield "purposes is empty, so no step counts"


def _class_problems(selector: Selector) -> Iterator[str]:
    known = [*dict.fromkeys([*(own.name for own in selector.classes), *class_names()])]
    wanted = selector.symbol
    if wanted in known or (wanted.endswith(".*") and any(name.startswith(wanted[:-1]) for name in known)):
        return
    near = difflib.get_close_matches(wanted, known, n=1)
    yield f"no such class, so it can match nothing; {f'did you mean {near[0]!r}?' if near else ', '.join(known)}"


def _regex_problem(pattern: str) -> str | None:
    try:
        found = compiled(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"not a regular expression: {error}"
    return "matches every name, so it tells nothing apart" if found.search("") else None


def _contradictory(rules: list[PlacedRule]) -> list[Problem]:
    found = []
    for required in (rule for rule in rules if rule.table == "require"):
        for forbidden in (rule for rule in rules if rule.table == "forbid"):
            if required.selector == forbidden.selector and _overlap(required, forbidden):
                text = f"{required.selector.told} is required (line {required.line}) and forbidden"
                found.append(Problem(text, forbidden.line, forbidden.path))
    return found


def _overlap(first: PlacedRule, second: PlacedRule) -> bool:
    for name in ("ranks", "executions"):
        one, other = getattr(first.rule, name), getattr(second.rule, name)
        stated = isinstance(one, tuple) and isinstance(other, tuple) and "any" not in (*one, *other)
        if stated and not set(one) & set(other):
            return False
    return True
