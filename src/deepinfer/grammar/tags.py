"""Free text with constrained regions: reasoning before an answer, calls of tools between sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.core.errors import EmptyLanguage, GrammarSyntaxError
from deepinfer.grammar import ir
from deepinfer.grammar.combine import Assembly
from deepinfer.grammar.free_text import encoded, text_before, text_without
from deepinfer.grammar.grammar import Grammar

__all__ = ["Tag", "any_text", "reasoning", "tagged_text", "triggered"]


@dataclass(frozen=True, slots=True)
class Tag:
    """A region of an output: what opens it, what stands in it, what closes it.

    Attributes:
        begin: The opening string; not empty.
        content: What stands in it.
        end: The closing string; may be empty.
    """

    begin: str
    content: Grammar
    end: str = ""


def any_text(*, excludes: Sequence[str] = ()) -> Grammar:
    """A grammar of all text in which certain strings do not occur.

    Args:
        excludes: The strings.

    Returns:
        The grammar.

    Raises:
        GrammarSyntaxError: A string is empty or not encodable.

    Examples:
        >>> any_text(excludes=["abcd"]).matches("abcabc"), any_text(excludes=["abcd"]).matches("abcabcd")
        (True, False)
    """
    expr = text_without(encoded(excludes, "an excluded string"))
    return Grammar(ir.Rules.of(expr), source="any_text")


def reasoning(answer: Grammar, *, end: str = "</think>", begin: str = "") -> Grammar:
    """Free reasoning up to the first closing mark, then an answer of a grammar.

    When the mark is a control token of the vocabulary, name its id in `text_ids` of `Grammar.bind`: without that no
    control token is ever allowed.

    Args:
        answer: The grammar of what follows the mark.
        end: The mark that closes the reasoning.
        begin: What the reasoning starts with; empty when the prompt has opened it.

    Returns:
        The grammar.

    Raises:
        GrammarSyntaxError: The closing mark is empty, or a mark is not encodable.

    Examples:
        >>> from deepinfer.grammar import choices
        >>> grammar = reasoning(choices(["yes", "no"]))
        >>> grammar.matches("Let me see </think>yes"), grammar.matches("yes")
        (True, False)
    """
    (closing,) = encoded([end], "end")
    opening = ir.literal(encoded([begin], "begin")[0]) if begin else ir.EPS
    assembly = Assembly()
    expr = ir.seq(opening, text_before(closing), assembly.add(answer))
    return assembly.grammar(expr, "reasoning")


def tagged_text(
    tags: Sequence[Tag],
    triggers: Sequence[str],
    *,
    at_least_one: bool = False,
    stop_after_first: bool = False,
    excludes: Sequence[str] = (),
) -> Grammar:
    """Free text in which a trigger opens a tag.

    As soon as a trigger is complete in the text, the output must go on as a tag that begins with it. No trigger
    occurs in the text otherwise. What stands inside of a tag is the business of its content alone.

    Args:
        tags: The tags; each begins with one trigger at least.
        triggers: Strings that open tags.
        at_least_one: Whether the output begins with a tag, without text before it.
        stop_after_first: Whether the output ends with its first tag; else more text and more tags may follow.
        excludes: More strings that do not occur in the text.

    Returns:
        The grammar. With neither option, an output may have no tag at all.

    Raises:
        GrammarSyntaxError: A trigger or beginning is empty, or a tag begins with no trigger.
        EmptyLanguage: There are no tags, and one is asked for.

    Examples:
        >>> from deepinfer.grammar import compile_regex
        >>> call = Tag("<call>", compile_regex("[a-z]+"), "</call>")
        >>> grammar = tagged_text([call], ["<call"])
        >>> grammar.matches("Now <call>go</call>, done."), grammar.matches("Now <call")
        (True, False)
    """
    assembly = Assembly()
    regions = []
    for tag in tags:
        (begin,) = encoded([tag.begin], "the beginning of a tag")
        end = encoded([tag.end], "the end of a tag")[0] if tag.end else b""
        regions.append((begin, ir.seq(assembly.add(tag.content), ir.literal(end))))
    expr = triggered(
        regions,
        encoded(triggers, "a trigger"),
        at_least_one=at_least_one,
        stop_after_first=stop_after_first,
        excludes=encoded(excludes, "an excluded string"),
    )
    return assembly.grammar(expr, "tagged_text")


def triggered(
    regions: Sequence[tuple[bytes, ir.Expr]],
    triggers: Sequence[bytes],
    *,
    at_least_one: bool,
    stop_after_first: bool,
    excludes: Sequence[bytes] = (),
    ends: Sequence[bytes] = (),
) -> ir.Expr:
    """The expression behind `tagged_text`.

    Args:
        regions: The beginning of each tag, and an expression of what follows it.
        triggers: Strings that open tags.
        at_least_one: Whether the whole begins with a tag.
        stop_after_first: Whether it ends with its first tag.
        excludes: More strings that do not occur in the text.
        ends: Strings of which one closes the whole; none when it ends with the output.

    Returns:
        The expression, with the closing string.

    Raises:
        GrammarSyntaxError: A tag begins with no trigger.
        EmptyLanguage: There are no tags, and one is asked for.
    """
    for begin, _ in regions:
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise GrammarSyntaxError(
                f"the tag that begins with {begin.decode()!r} begins with no trigger; triggers are "
                f"{[trigger.decode() for trigger in triggers]}: add one"
            )
    if at_least_one and not regions:
        raise EmptyLanguage("at_least_one is asked for and there are no tags; give one")
    closing = ir.alt(*map(ir.literal, ends)) if ends else ir.EPS
    first = ir.alt(*(ir.seq(ir.literal(begin), body) for begin, body in regions))
    if at_least_one and stop_after_first:
        return ir.seq(first, closing)
    pieces = []
    for trigger in dict.fromkeys(triggers):
        behind = ir.alt(
            *(
                ir.seq(ir.literal(begin[len(trigger) :]), body)
                for begin, body in regions
                if begin.startswith(trigger)
            )
        )
        others = [other for other in (*triggers, *ends) if other != trigger]
        pieces.append(ir.seq(text_before(trigger, others, excludes), behind))
    piece = ir.alt(*pieces)
    tail = (
        ir.alt(*(text_before(end, (*triggers, *ends), excludes) for end in ends))
        if ends
        else text_without((*triggers, *excludes))
    )
    if stop_after_first:
        return ir.alt(tail, ir.seq(piece, closing))
    rest = ir.seq(ir.star(piece), tail)
    return ir.seq(first, rest) if at_least_one else rest
