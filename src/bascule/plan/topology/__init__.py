"""Which ranks share sequences: specs of compute bags, and the search for the best one."""

from bascule.plan.topology.spec import Topology as Topology
