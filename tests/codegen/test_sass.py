"""Instructions on the longest way through a kernel, counted by hand."""

from __future__ import annotations

from stepquant.codegen.sass import count_instructions

# Entry of 3, of which the second may leave for a return of 1; bodies of 2 and of 4 (a loop of 3 and its branch inside);
# a side way of 2 within a barrier's region; an end of 2. What follows the end is the usual jump to itself.
BODIES = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/              @!UP1 BRA `(.L_x_1) ;
        /*0030*/                   IADD3 R2, R2, R3, RZ ;
        /*0040*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0050*/                   IADD3 R2, R2, R4, RZ ;
.L_x_3:
        /*0060*/                   LDG.E R5, [R2.64] ;
        /*0070*/                   FADD R6, R6, R5 ;
        /*0080*/               @P1 BRA `(.L_x_3) ;
.L_x_2:
        /*0090*/                   BSSY B0, `(.L_x_4) ;
        /*00a0*/               @P2 BRA `(.L_x_5) ;
        /*00b0*/                   BSYNC B0 ;
.L_x_4:
        /*00c0*/                   STG.E [R2.64], R6 ;
        /*00d0*/                   EXIT ;
.L_x_5:
        /*00e0*/                   FADD R6, R6, 1 ;
        /*00f0*/                   BSYNC B0 ;
.L_x_0:
        /*0100*/                   EXIT ;
.L_x_6:
        /*0110*/                   BRA `(.L_x_6);
        /*0120*/                   NOP;
"""
TABLE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   BRX R8 -0x350 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*);
.L_x_0:
        /*0020*/                   FADD R6, R6, R5 ;
        /*0030*/                   EXIT ;
.L_x_1:
        /*0040*/                   FADD R6, R6, R5 ;
        /*0050*/                   FMUL R6, R6, R5 ;
        /*0060*/               @P0 EXIT ;
        /*0070*/                   EXIT ;
"""


def test_the_longest_body_counts_and_its_loops_take_their_trips() -> None:
    entry, loop, end = 3, 3, 2 + 3  # the end: into the barrier's region, past it, and out
    assert count_instructions(BODIES, 1) == (18, entry + 1 + loop + end)
    assert count_instructions(BODIES, 5) == (18, entry + 1 + 5 * loop + end)


def test_conditions_as_operands_are_conditions_too() -> None:
    """As the disassembler writes branches from sm_100 on."""
    for written in ("@!UP1 BRA `(.L_x_1)", "@P1 BRA `(.L_x_3)", "@P2 BRA `(.L_x_5)", "@!P0 BRA `(.L_x_0)"):
        condition, _, target = written.partition(" BRA ")
        listing = BODIES.replace(written, f"BRA.U {condition[1:]}, {target}")
        assert listing != BODIES
        assert count_instructions(listing, 5) == count_instructions(BODIES, 5)


def test_a_table_of_branches() -> None:
    assert count_instructions(TABLE, 4) == (8, 2 + 4)


def test_nothing_counts_nothing() -> None:
    assert count_instructions("", 4) == (0, 0)
