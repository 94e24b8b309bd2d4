"""Registers that a product of tensor cores in flight still reads, and what writes them too early.

A product of Hopper may take its left operand from registers, and reads them after it was issued; they are free when the
products are waited for. The assembler is to see to that, but where a branch lies between a product and its wait it may
give the registers away, and the results are wrong now and then.
"""

from __future__ import annotations

import re

__all__ = ["overwritten_operands"]

_LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"\s*(\.L_\w+):")
_PRODUCT = re.compile(r"[HQI]GMMA\.\S+\s+R\d+, R(\d+), gdesc")
_BRANCH = re.compile(r"BRA\S*\s.*?\(?(\.L_\w+)\)")
_WAIT = "WARPGROUP.DEPBAR"
# What writes no register, or none that it names first.
_SILENT = ("BAR", "BRA", "DEPBAR", "EXIT", "GMMA", "HGMMA", "IGMMA", "ISETP", "FSETP", "LDGSTS", "NOP", "QGMMA", "R2UR",
           "RET", "ST", "STG", "STL", "STS", "STSM", "SYNCS", "UTMALDG", "WARPGROUP", "WARPSYNC")  # fmt: skip


def _written(instruction: str) -> set[int]:
    """Numbers of the registers that an instruction writes."""
    found = re.match(r"(?:@!?U?P\w+ )?([A-Z0-9_]+)(\S*)\s+R(\d+)\b", instruction)
    if found is None or found[1] in _SILENT:
        return set()
    width = 4 if ".128" in found[2] else 2 if ".64" in found[2] or ".WIDE" in found[2] else 1
    return set(range(int(found[3]), int(found[3]) + width))


def overwritten_operands(listing: str) -> list[str]:
    """Instructions that write a register which a product in flight reads.

    Args:
        listing: What nvdisasm -c prints of a kernel.

    Returns:
        The instructions, each once; waits are taken to be for all products.
    """
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif matched := _LINE.match(line):
            code.append(matched[1])
    found: dict[int, str] = {}
    for first, instruction in enumerate(code):
        product = _PRODUCT.search(instruction)
        if product is None:
            continue
        operand = set(range(int(product[1]), int(product[1]) + 4))
        ways = [first + 1]
        seen: set[int] = set()
        while ways:
            at = ways.pop()
            while at < len(code) and at not in seen and _WAIT not in code[at]:
                seen.add(at)
                if operand & _written(code[at]):
                    found[at] = code[at]
                    break
                branch = _BRANCH.search(code[at])
                if branch and branch[1] in labels:
                    ways.append(labels[branch[1]])
                    if not code[at].startswith("@"):
                        break
                at += 1
    return [found[at] for at in sorted(found)]
