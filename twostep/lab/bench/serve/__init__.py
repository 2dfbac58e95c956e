"""`twostep bench serve`: load on a router, and what its users would have felt.

    arrivals, lengths, workloads    when requests come, how long they are, what they ask for       pure
    quoting                         chats whose answers quote them                                 pure
    target                          speaks to the router
    runner, load                    sends them, notes every token's time
    metrics, causes                 times to figures, and where the time went                      pure
    summary, report                 figures to tables and JSON                                     pure
    sweep                           which rate to try next                                         pure
    page                            where the time went, as an HTML file                           pure
    saved                           requests of earlier runs, out of files
    plots                           figures to a picture: needs matplotlib

docs/benchmarking.md has the definitions.
"""
