"""What each instruction of the scalar side does, as Python expressions over integers of 32 bits."""

from __future__ import annotations

from typing import Literal

# Expressions over the arguments {0}, {1}, ...; `wrap` brings a sum back into 32 bits, `U` is the unsigned value.
# Predicates are True, False or not known, which bitwise operators take; `if` would not.
_ARITHMETIC = {
    "sadd.s32": "wrap({0}+{1})",
    "sadd.u32": "wrap({0}+{1})",
    "ssub.s32": "wrap({0}-{1})",
    "ssub.u32": "wrap({0}-{1})",
    "smul.u32": "wrap({0}*{1})",
    "smul.s32": "wrap({0}*{1})",
    "smulhi.u32": "wrap((U({0})*U({1}))>>32)",
    "smulhi.s32": "(({0}*{1})>>32)",
    "sand.u32": "({0}&{1})",
    "sand.s32": "({0}&{1})",
    "sor.u32": "({0}|{1})",
    "sor.s32": "({0}|{1})",
    "sxor.u32": "({0}^{1})",
    "sxor.s32": "({0}^{1})",
    "snot.u32": "(~{0})",
    "sshll.u32": "wrap({0}<<({1}&31))",
    "sshll.s32": "wrap({0}<<({1}&31))",
    "sshrl.u32": "wrap(U({0})>>({1}&31))",
    "sshra.s32": "({0}>>({1}&31))",
    "smin.s32": "choose({0}<{1},{0},{1})",
    "smax.s32": "choose({0}>{1},{0},{1})",
    "smin.u32": "choose(U({0})<U({1}),{0},{1})",
    "smax.u32": "choose(U({0})>U({1}),{0},{1})",
    "sclz.u32": "(32-U({0}).bit_length())",
    "sdivrem.u32": "wrap(U({0})//U({1}))",
    "scalar_lea.hbm": "({0}+{1})",
    "scalar_lea.vmem": "({0}+{1})",
    "scalar_lea.smem": "({0}+{1})",
    "scalar_lea.sflag": "({0}+{1})",
    "int_to_ptr.hbm": "{0}",
    "int_to_ptr.vmem": "{0}",
    "int_to_ptr.smem": "{0}",
    "int_to_ptr.sflag": "{0}",
    "smov.u32": "{0}",
    "smov.s32": "{0}",
    "smov.f32": "{0}",
    "pmov": "{0}",
    "pneg": "({0}^True)",
    "pand": "({0}&{1})",
    "por": "({0}|{1})",
    "pnand": "({0}&{1}^True)",
    "pnor": "(({0}|{1})^True)",
    "pxor": "({0}^{1})",
    "scalar_select": "choose({0},{1},{2})",
    "sld": "M[{0}]",
}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
for _name, _sign in _COMPARISONS.items():
    for _order in ("", ".totalorder"):
        _ARITHMETIC[f"scmp.{_name}.s32{_order}"] = f"({{0}}{_sign}{{1}})"
        _ARITHMETIC[f"scmp.{_name}.u32{_order}"] = f"(U({{0}}){_sign}U({{1}}))"

# Values that the scalar side alone does not determine: they may be moved about, but nothing may depend on them.
UNKNOWN = {
    "spop": "a value that the vector unit computes",
    "spop.drf": "a value that the vector unit computes",
    "spop.sfrf": "a value that the vector unit computes",
    "vsyncmov": "the state of a semaphore",
    "srdreg": "the state of the machine",
}
_FLOATING = (
    *(f"{op}.f32" for op in ("sadd", "ssub", "smul", "smin", "smax", "sdiv")),
    *(f"scmp.{name}.f32{order}" for name in _COMPARISONS for order in (".partialorder", ".totalorder", "")),
    *("scvt.s32.to.f32", "scvt.f32.to.s32", "scvt.s32.f32", "scvt.f32.s32"),
)

EXPRESSIONS: dict[str, str] = {
    **_ARITHMETIC,
    **{name: f"Unknown({reason!r})" for name, reason in UNKNOWN.items()},
    **dict.fromkeys(_FLOATING, "floating({arguments})"),
}

_MEMORIES = ("hbm", "vmem", "smem")

Effect = Literal["set", "phi", "store", "branch", "signal", "reset", "wait", "dma", "delay"]

SCALAR_OPS: dict[str, Effect] = {
    **dict.fromkeys(EXPRESSIONS, "set"),
    "sphi": "phi",
    "sst": "store",
    "sbr.rel": "branch",
    "vsyncadd": "signal",
    "vsyncpa": "reset",
    "dma.done.wait": "wait",
    **dict.fromkeys((f"dma.{a}_to_{b}" for a in _MEMORIES for b in _MEMORIES), "dma"),
    "dma.general": "dma",
    "vdelay": "delay",
}

# Checks that stop a kernel with an error, orders that a simulation keeps anyhow, and marks for a profiler.
IGNORED = frozenset(
    {
        *("shalt", "shalt.err", "sfence", "strace", "vtrace", "snop", "scheck"),
        *("compiler-scheduling-barrier", "compiler_scheduling_barrier"),
        *(f"inlined_call_operand.{space}" for space in ("hbm", "vmem", "smem", "cmem")),
        "inlined_call_operand",
    }
)


def wrap(value: int) -> int:
    """`value` as a signed integer of 32 bits."""
    return ((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def unsigned(value: int) -> int:
    """The unsigned integer with the bits of `value`."""
    return value & 0xFFFFFFFF
