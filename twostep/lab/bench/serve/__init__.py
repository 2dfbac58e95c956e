"""`twostep bench serve`: load on a served model, and what its users would have felt.

    arrivals    when requests come                   pure
    workloads   what they ask for                    pure
    traces      the same, out of files               pure
    target      what is asked: grpc_target, openai_target
    runner      sends them, notes every token's time
    metrics     times to figures                     pure
    report      figures to tables and JSON           pure
    sweep       which rate to try next               pure
    plots       figures to pictures

Everything but `openai_target` (aiohttp) and `plots` (matplotlib) needs the base install alone. docs/benchmarking.md has the definitions.
"""
