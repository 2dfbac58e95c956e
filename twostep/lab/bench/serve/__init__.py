"""`twostep bench serve`: load on a router, and what its users would have felt.

    arrivals, lengths, workloads    when requests come, how long they are, what they ask for       pure
    target                          speaks to the router
    runner, load                    sends them, notes every token's time
    metrics, summary, report        times to figures, figures to tables and JSON                   pure
    sweep                           which rate to try next                                         pure
    plots                           figures to a picture: needs matplotlib

docs/benchmarking.md has the definitions.
"""
