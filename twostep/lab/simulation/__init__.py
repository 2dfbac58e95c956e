"""The autoscaler on a clock of its own: traces of requests, a cluster that serves them, and who scales it.

    python -P -m twostep.lab.simulation --trace mixed --seeds 3

traces.py     how many requests come, how long they are, and which workers are lost
pods.py       the simulated cluster (twostep/lab/simulator) with pods that start, drain, switch and are lost
sampling.py   what a controller can see of it, and how late
scalers.py    who decides: the joint policy, two HPAs
hpa.py        Kubernetes's formula and behaviour
run.py        one simulation
outcome.py    what users felt and what it cost
"""
