"""Registers that products in flight read: found in listings as the disassembler prints them."""

from __future__ import annotations

from deepinfer.kernels.codegen_operands import overwritten_operands

PRODUCT = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, R88, gdesc[UR16], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def listing(*lines: str) -> str:
    return "\n".join(
        line if line.startswith(".L") else f"        /*{16 * i:04x}*/                   {line} ;"
        for i, line in enumerate(lines)
    )


def test_a_write_before_the_wait_is_found() -> None:
    write = "LOP3.LUT R91, R16, 0x80808080, R91, 0xea, !PT"
    assert overwritten_operands(listing(PRODUCT, write, WAIT)) == [write]
    assert overwritten_operands(listing(PRODUCT, WAIT, write)) == []
    assert overwritten_operands(listing(PRODUCT, write.replace("R91", "R92"), WAIT)) == []


def test_wide_writes_and_stores() -> None:
    assert overwritten_operands(listing(PRODUCT, "LDS.128 R86, [R2]", WAIT)) == ["LDS.128 R86, [R2]"]  # fmt: skip
    assert overwritten_operands(listing(PRODUCT, "LDS.64 R86, [R2]", WAIT)) == []
    assert overwritten_operands(listing(PRODUCT, "STS [R90], R90", "BAR.SYNC R89", WAIT)) == []


def test_branches_are_followed() -> None:
    write = "PRMT R88, R22, 0x7771, RZ"
    away = listing(PRODUCT, "@P1 BRA `(.L_x_2)", WAIT, "EXIT", ".L_x_2:", write, WAIT)
    assert overwritten_operands(away) == [write]
    always = listing(PRODUCT, "BRA `(.L_x_2)", write, ".L_x_2:", WAIT)
    assert overwritten_operands(always) == []
    back = listing(".L_x_1:", WAIT, write, PRODUCT, "@P0 BRA `(.L_x_1)", WAIT)
    assert overwritten_operands(back) == []


def test_products_of_shared_memory_read_no_registers() -> None:
    shared = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR16], R24, gsb0"
    assert overwritten_operands(listing(shared, "MOV R88, R2", WAIT)) == []
