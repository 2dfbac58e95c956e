"""The autoscaler on a clock of its own: traces of requests, a cluster that serves them, and who scales it.

    python -P -m twostep.lab.simulation --trace mixed --seeds 3

traces.py     how many requests come, how long they are, and which workers are lost
hardware.py   how fast a worker is and what it holds
prefill_side.py, decode_side.py   one worker in each role
worker.py     one pod's worker: starting, serving, draining, switching
cluster.py    the event loop: arrivals, placement, hand-over, losses, what Deployments do
sampling.py   what a controller can see of it, and how late
scalers.py    who decides: the joint policy, two HPAs, a fixed ratio, a fixed fleet
hpa.py        Kubernetes's formula and behaviour
outcome.py    what users felt and what it cost
"""
