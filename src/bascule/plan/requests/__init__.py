"""Schedule requests: which request runs next, on which ranks, at which degree.

Ranks form blocks: aligned runs of 1, 2, 4, .. ranks. A request runs its denoising steps on one
block, and may move to another block at a step boundary. A policy decides when a request arrives,
ends, or stops because the policy recalled it. Simulation and server run the same pure policies.
"""

from bascule.plan.requests.balanced import Balanced as Balanced
from bascule.plan.requests.boarding import board as board
from bascule.plan.requests.bound import RequestBound as RequestBound
from bascule.plan.requests.bound import request_bound as request_bound
from bascule.plan.requests.foresight import foresee as foresee
from bascule.plan.requests.queues import POLICIES as POLICIES
from bascule.plan.requests.queues import SERVED as SERVED
from bascule.plan.requests.queues import EarliestDeadline as EarliestDeadline
from bascule.plan.requests.queues import Queue as Queue
from bascule.plan.requests.queues import common_degree as common_degree
from bascule.plan.requests.queues import policy_of as policy_of
from bascule.plan.requests.state import NEVER as NEVER
from bascule.plan.requests.state import Block as Block
from bascule.plan.requests.state import Job as Job
from bascule.plan.requests.state import Policy as Policy
from bascule.plan.requests.state import Request as Request
from bascule.plan.requests.state import Starts as Starts
from bascule.plan.requests.state import State as State
