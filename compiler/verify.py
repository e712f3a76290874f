"""Pass `verify`: proofs about a plan before anything is rendered from it.

Each check is a function of the plan that returns what it showed or raises `VerifyError`:

- `check_memory`: addresses, sizes, and that whole tiles are all the bytes of every weight;
- `check_ring`: chunks and the warps' shares of them part every tile, and chunks are given back;
- `check_programs`: every task is done exactly once, by the right SM, in the order of phases;
- `check_rules`: the rules for dynamic work part it, whatever lengths and routing are;
- `check_packets`: every packet of every set is written exactly once an epoch;
- `check_shared`: what the warps of an SM share is read before it is overwritten;
- `check_order`: the waits of all warps for one another have no cycle, so nothing waits for ever,
  and a buffer used a second time has been read before.

They lean on each other in that order; docs/proofs.md has the whole argument and what it assumes.
What they do not cover is the kernel's code: that it does what an entry says is shown by comparing
it with the interpreter and the reference.
"""

from __future__ import annotations

from mkc.compiler.plan import Plan
from mkc.compiler.proof import Proof, Property, VerifyError
from mkc.compiler.verify_memory import check_memory
from mkc.compiler.verify_order import check_order
from mkc.compiler.verify_packets import check_packets
from mkc.compiler.verify_programs import check_programs
from mkc.compiler.verify_ring import check_ring
from mkc.compiler.verify_rules import check_rules
from mkc.compiler.verify_shared import check_shared

__all__ = ["Proof", "Property", "VerifyError", "verify"]


def verify(plan: Plan) -> Proof:
    """Proves a plan. Raises VerifyError (MKC301 to MKC307) on the first fault."""
    memory = check_memory(plan)
    ring = check_ring(plan)
    programs = check_programs(plan)
    rules = check_rules(plan)
    packets = check_packets(plan)
    shared = check_shared(plan)
    order, edges = check_order(plan)
    return Proof(
        properties=(*memory, *ring, *programs, *rules, *packets, *shared, *order),
        entries=sum(len(program) for program in plan.programs),
        packets=plan.layout.packet_count,
        edges=edges,
    )
