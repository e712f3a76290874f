"""Pass `verify`: proofs about a plan before anything is rendered from it.

Each check is a function of the plan that returns what it showed or raises `VerifyError`:

- `check_memory`: addresses, sizes, and that whole tiles are all the bytes of every weight;
- `check_programs`: every task is done exactly once, by the right SM, in the order of phases;
- `check_packets`: every packet of every set is written exactly once an epoch, whatever the lengths
  and the routing;
- `check_order`: program order and packets together have no cycle, so nothing waits for ever, and
  a buffer used a second time has been read before.

They lean on each other in that order. What they do not cover is the kernel's code: that it does
what an entry says is shown by comparing it with the interpreter and the reference.
"""

from __future__ import annotations

from mkc.compiler.plan import Plan
from mkc.compiler.proof import Proof, Property, VerifyError
from mkc.compiler.verify_memory import check_memory
from mkc.compiler.verify_order import check_order
from mkc.compiler.verify_packets import check_packets
from mkc.compiler.verify_programs import check_programs

__all__ = ["Proof", "Property", "VerifyError", "verify"]


def verify(plan: Plan) -> Proof:
    """Proves a plan. Raises VerifyError (MKC301 to MKC307) on the first fault."""
    memory = check_memory(plan)
    programs = check_programs(plan)
    packets = check_packets(plan)
    order, edges = check_order(plan)
    return Proof(
        properties=(*memory, *programs, *packets, *order),
        entries=sum(len(program) for program in plan.programs),
        packets=plan.layout.packet_count,
        edges=edges,
    )
