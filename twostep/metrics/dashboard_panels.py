"""Lists what Grafana's dashboard shows. twostep/metrics/dashboard.py makes Grafana's JSON of it.

    = title of a row
    kind title | unit options | what it says            kind: lines, areas (on top of one another), number (of a quarter of the width)
      legend = PromQL                                   options: width=8 of 24 columns, max=1, and from which value on a number has which
      percentiles HISTOGRAM                             colour; percentiles: the 50th, 95th and 99th

A line that is indented further goes on with the one above. `{S}`: of the deployment that is looked at; `{R}`: and of the roles; `[W]`: the
window that Grafana chooses by the scrape interval. Tests check names and labels against what the code exports.
"""

from __future__ import annotations

PANELS = """\
= Overview
number Requests | reqps | Ended requests a second.
  sum (rate(twostep_requests_total{S}[W]))
number Errors | percentunit 0:green,0.01:orange,0.05:red | Share of requests that the system owed an answer and gave none.
  (sum (rate(twostep_requests_total{S, status=~"UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED|DATA_LOSS|UNKNOWN"}[W])) or vector(0)) / sum
      (rate(twostep_requests_total{S, status!="CANCELLED"}[W]))
number TTFT p99 | s | Time to the first token.
  histogram_quantile(0.99, sum by (le) (rate(twostep_time_to_first_token_seconds_bucket{S}[W])))
number TPOT p99 | s | Mean time of a token after the first, of each answer.
  histogram_quantile(0.99, sum by (le) (rate(twostep_request_time_per_output_token_seconds_bucket{S}[W])))
number SLO attainment | percentunit 0:red,0.95:orange,0.99:green | Of requests with targets, those that ended within all of them.
  sum (rate(twostep_request_slo_attained_total{S}[W])) / sum (rate(twostep_request_slo_total{S}[W]))
number Prefix hit rate | percentunit | Of prompt tokens looked up on workers, those whose KV was there.
  sum (rate(twostep_prefix_cache_hits_total{S}[W])) / sum (rate(twostep_prefix_cache_queries_total{S}[W]))
number P:D load | none 0:orange,0.33:green,3:orange | Prompts to compute per worker for prefill over answers per worker for decode: above 1
    prefill is short, below 1 decode.
  avg(twostep_prefill_decode_load_ratio{S})
number Workers | none 0:red,1:green | That may get new work, as routers see them.
  {{worker_role}} = max by (worker_role) (twostep_router_workers{S})
= Requests
areas Requests by status | reqps | Ended requests by gRPC status. CANCELLED: the client went away.
  {{status}} = sum by (status) (rate(twostep_requests_total{S}[W]))
areas Requests by class | reqps | Interactive goes first, batch fills the gaps.
  {{request_class}} = sum by (request_class) (rate(twostep_requests_total{S}[W]))
areas Refused, or out of time | reqps | Before any worker had begun with them.
  {{reason}} = sum by (reason) (rate(twostep_requests_refused_total{S}[W]))
lines Running and waiting | none | Requests in routers; sequences in workers.
  running, {{role}} = sum by (role) (twostep_num_requests_running{R})
  waiting, {{role}} = sum by (role) (twostep_num_requests_waiting{R})
lines Tokens | none | Prompt tokens, those of them that came out of prefix caches, and tokens sent to clients.
  prompt = sum (rate(twostep_prompt_tokens_total{S}[W]))
  of it cached = sum (rate(twostep_prompt_tokens_cached_total{S}[W]))
  generated = sum (rate(twostep_generation_tokens_total{S}[W]))
lines HTTP | reqps | Requests by route and class of status.
  {{handler}} {{status}} = sum by (handler, status) (rate(twostep_http_requests_total{S}[W]))
lines Open event streams | none | Server-sent events, by route.
  {{handler}} = sum by (handler) (twostep_http_open_streams{S})
lines Batch requests | reqps | Requests of batches by outcome, and those asked once more.
  {{status}} = sum by (status) (rate(twostep_batch_requests_total{S}[W]))
  asked once more = sum (rate(twostep_batch_request_retries_total{S}[W]))
lines Batches | none | Those that are not over, and those that routers run.
  open = max(twostep_batch_jobs_open{S})
  {{state}} = sum by (state) (twostep_batch_jobs{S})
  {{status}} = sum by (status) (increase(twostep_batch_jobs_ended_total{S}[W]))
lines Begun again elsewhere | none | Requests that went on on other workers because one was lost.
  migrations = sum(increase(twostep_request_migrations_total{S}[W]))
lines Lengths | none | Median tokens of prompts and of answers.
  prompt = histogram_quantile(0.5, sum by (le) (rate(twostep_request_prompt_tokens_bucket{S}[W])))
  answer = histogram_quantile(0.5, sum by (le) (rate(twostep_request_generation_tokens_bucket{S}[W])))
= Latency
lines TTFT | s | From a request's arrival to its first token.
  percentiles twostep_time_to_first_token_seconds
lines TTFT, visible | s | To the first text of the answer itself: later than the first token where a model thinks first.
  percentiles twostep_time_to_first_visible_token_seconds
lines TPOT | s | Of each answer, the mean time of its tokens after the first.
  percentiles twostep_request_time_per_output_token_seconds
lines Between two tokens | s | Every gap is one observation.
  percentiles twostep_inter_token_latency_seconds
lines First to second token | s | Of prompts handed over, what the hand-over adds.
  percentiles twostep_second_token_seconds
lines Whole requests | s | From arrival to the last token, of those that ended well.
  percentiles twostep_e2e_request_latency_seconds
lines Queue p95 by class | s width=12 | From arrival until a worker computes the prompt.
  {{request_class}} = histogram_quantile(0.95, sum by (le, request_class) (rate(twostep_request_queue_time_seconds_bucket{S}[W])))
areas Where the time goes | s width=12 | Mean seconds of each phase of a request that ended well.
  {{phase}} = sum by (phase) (rate(twostep_request_phase_seconds_sum{S}[W])) / sum by (phase)
      (rate(twostep_request_phase_seconds_count{S}[W]))
= Prefill and decode
lines P:D load ratio | none | Seconds of prompts per worker for prefill, for each second of answers per worker for decode.
  {{instance}} = twostep_prefill_decode_load_ratio{S}
lines Workers by role | none | That may get new work, as routers see them.
  {{worker_role}} = max by (worker_role) (twostep_router_workers{S})
areas Kept and moved | reqps | local: one worker computes the prompt and decodes, with what it is for. handed_over: KV moves.
  {{path}}, {{worker_role}} = sum by (path, worker_role) (rate(twostep_request_placements_total{S}[W]))
areas Why kept, why moved | reqps | near: moving gains less than the prediction's noise. unfit: the other way misses a target by more,
    rounds the KV, or is full.
  {{path}}: {{reason}} = sum by (path, reason) (rate(twostep_request_placements_total{S}[W]))
lines Predicted and actual | none | Median and 95th percentile of what a request took over what its placement predicted; 1: as predicted.
  {{kind}} {{path}} p50 = histogram_quantile(0.5, sum by (le, kind, path) (rate(twostep_request_prediction_ratio_bucket{S}[W])))
  {{kind}} {{path}} p95 = histogram_quantile(0.95, sum by (le, kind, path) (rate(twostep_request_prediction_ratio_bucket{S}[W])))
areas Tokens computed | none | By workers, of prompts and of answers.
  {{role}}: {{kind}} = sum by (role, kind) (rate(twostep_engine_tokens_total{R}[W]))
lines Step p95 | s | Duration of an engine step by what it computed.
  {{role}}: {{kind}} = histogram_quantile(0.95, sum by (le, role, kind) (rate(twostep_engine_step_duration_seconds_bucket{R}[W])))
lines Drafts accepted | percentunit max=1 | Of the tokens drafted (--speculative-config) at each position, those that were right.
  {{role}} {{position}} = sum by (role, position) (rate(twostep_spec_decode_num_accepted_tokens_total{R}[W])) / sum by (role, position)
      (rate(twostep_spec_decode_num_draft_tokens_total{R}[W]))
lines Busiest expert | none | Its tokens over the mean of its layer, in the least even layer; 1 is even. Mixtures of experts only.
  {{role}} {{instance}} = twostep_expert_imbalance_ratio{R}
lines Sequences | none | reserved: blocks set aside, KV still to come. held: computed, KV not yet fetched.
  {{role}}: running = sum by (role) (twostep_num_requests_running{R})
  {{role}}: reserved = sum by (role) (twostep_num_requests_reserved{R})
  {{role}}: held = sum by (role) (twostep_num_requests_held{R})
= KV cache
lines KV usage | percentunit max=1 | Share of blocks that sequences own.
  {{role}} {{instance}} = twostep_kv_cache_usage_ratio{R}
areas Blocks | none | used: owned by sequences. cached: prefixes that may be reused, or given up.
  {{role}}: {{state}} = sum by (role, state) (twostep_kv_cache_blocks{R})
lines Prefix hit rate | percentunit max=1 | Of prompt tokens looked up, those found; host: those copied back from host memory.
  {{role}} = sum by (role) (rate(twostep_prefix_cache_hits_total{R}[W])) / sum by (role) (rate(twostep_prefix_cache_queries_total{R}[W]))
  {{role}}: host = sum by (role) (rate(twostep_prefix_cache_host_hits_total{R}[W])) / sum by (role)
      (rate(twostep_prefix_cache_queries_total{R}[W]))
lines Preemptions | none | Sequences that gave their blocks to older ones.
  {{role}} = sum by (role) (increase(twostep_num_preemptions_total{R}[W]))
lines Swapped | Bps | KV copied to host memory and back.
  {{role}} = sum by (role) (rate(twostep_kv_swapped_bytes_total{R}[W]))
lines Prefixes in host memory | none | Blocks below the KV cache (--prefix-cache-space).
  {{role}} = sum by (role) (twostep_prefix_cache_host_blocks{R})
= Hand-over
areas KV fetched | Bps | Bytes a second, by transport.
  {{transport}} = sum by (transport) (rate(twostep_kv_transfer_bytes_total{S, direction="fetch"}[W]))
lines Rate of one fetch | Bps | Median bytes a second while it copies.
  {{transport}} = histogram_quantile(0.5, sum by (le, transport) (rate(twostep_kv_transfer_bytes_per_second_bucket{S}[W])))
lines Exposed p95 | s | What a client may feel of a hand-over. publish: after the first token. fetch: after the last block was published.
  {{direction}} {{transport}} = histogram_quantile(0.95, sum by (le, direction, transport)
      (rate(twostep_kv_transfer_exposed_seconds_bucket{S}[W])))
lines Failures | none | Failed hand-overs by reason; cancelled: a client went away.
  {{direction}}: {{reason}} = sum by (direction, reason) (increase(twostep_kv_transfer_failures_total{S}[W]))
lines Chunks fetched again | none | data_loss: the checksum did not match.
  {{transport}}: {{reason}} = sum by (transport, reason) (increase(twostep_kv_transfer_retries_total{S}[W]))
lines Leases | none | Hand-overs under way, and the age of the oldest.
  {{role}}: leases = sum by (role) (twostep_kv_leases{R})
  {{role}}: oldest, seconds = max by (role) (twostep_kv_oldest_lease_seconds{R})
lines Published and not fetched | bytes | KV in the KV agents and pools.
  {{transport}} = sum by (transport) (twostep_kv_stored_bytes{R})
lines Transports that work | none | Workers on which each does.
  {{role}}: {{transport}} = sum by (role, transport) (twostep_kv_transport_ready{R})
lines Probe copies | Bps | What the last one from each prefill worker reached; 0: that way is closed.
  {{transport}} {{peer}} = min by (transport, peer) (twostep_kv_probe_bytes_per_second{S})
= Targets
lines Attainment by class | percentunit max=1 | Of requests with targets, those that ended within all of them.
  {{request_class}} = sum by (request_class) (rate(twostep_request_slo_attained_total{S}[W])) / sum by (request_class)
      (rate(twostep_request_slo_total{S}[W]))
areas Missed | reqps | Targets that were missed.
  {{reason}} = sum by (reason) (rate(twostep_request_slo_missed_total{S}[W]))
lines Error budget burnt | none | How many times as fast as a month's budget of 1% allows (prometheus/rules.yaml); alerts from 14.4 over
    an hour.
  over 1 h = max(twostep:request_slo_missed:ratio_rate1h{namespace=~"$namespace"}) / 0.01
  over 6 h = max(twostep:request_slo_missed:ratio_rate6h{namespace=~"$namespace"}) / 0.01
= Autoscaler
lines Workers wanted and there | none | By role: what was decided last, what the load asks for by itself (without spare, bounds and
    cool-down), and what serves.
  {{worker_role}} wanted = max by (worker_role) (twostep_autoscaler_desired_workers{S})
  {{worker_role}} needed = max by (worker_role) (twostep_autoscaler_needed_workers{S})
  {{worker_role}} there = max by (worker_role) (twostep_autoscaler_workers{S})
lines Pods wanted and there | none | By Deployment: a worker that has changed its role counts for the Deployment that owns its pod.
  {{worker_role}} wanted = max by (worker_role) (twostep_autoscaler_desired_replicas{S})
  {{worker_role}} there or to come = max by (worker_role) (twostep_autoscaler_pods{S})
lines Cost | none | Of the pods wanted, an hour, by the prices that the autoscaler was told.
  an hour = max(twostep_autoscaler_cost_per_hour{S})
lines Attainment seen | percentunit max=1 | Share of answers within the targets that the deployment is scaled for, as the autoscaler sees
    it.
  {{kind}} = max by (kind) (twostep_autoscaler_attainment_ratio{S})
lines Load seen | reqps | Offered requests of all routers, refused ones included.
  requests = max(twostep_autoscaler_requests_per_second{S})
areas Decisions | none | By what they change, and those that a bound held back.
  {{kind}} = sum by (kind) (increase(twostep_autoscaler_decisions_total{S}[W]))
  held back by {{reason}} = sum by (reason) (increase(twostep_autoscaler_limited_total{S}[W]))
lines Leaders, answers | none | Replicas that decide (1, for a moment 0), replicas that answer KEDA, and the age of what they answer in
    minutes.
  leaders = sum(twostep_autoscaler_leader{S})
  answering = sum(twostep_autoscaler_answering{S})
  age, minutes = max(twostep_autoscaler_decision_age_seconds{S}) / 60
lines Turns | none | How often growing became shrinking or the other way round, by Deployment.
  {{worker_role}} = sum by (worker_role) (increase(twostep_autoscaler_direction_changes_total{S}[W]))
areas Role switches, marked pods, looks in vain | none | Changes of roles that were asked for; pods marked as those to go first; looks
    that led to no decision.
  switches, {{status}} = sum by (status) (increase(twostep_autoscaler_switches_total{S}[W]))
  pods, {{status}} = sum by (status) (increase(twostep_autoscaler_pod_patches_total{S}[W]))
  in vain, {{reason}} = sum by (reason) (increase(twostep_autoscaler_skipped_total{S}[W]))
= Health
lines Ready | none max=1 | Workers that take new work.
  {{role}} {{instance}} = twostep_worker_ready{R}
lines Standing still | s | Since an engine's last step while it has work; since a router's event loop came round.
  {{role}} {{instance}} = twostep_engine_stalled_seconds{R}
  router {{instance}} = twostep_router_stalled_seconds{S}
lines Redis, streams | none | Whether routers reach Redis, and their open token streams to decode workers.
  Redis, {{instance}} = twostep_router_registry_connected{S}
  streams, {{instance}} = twostep_router_streams{S}
lines Memory | bytes | Resident, of each process; engine: of a worker's other one.
  {{job}} {{instance}} = process_resident_memory_bytes{S}
  engine, {{role}} {{instance}} = twostep_engine_process_resident_memory_bytes{R}
lines CPU | none | Cores in use, of each process.
  {{job}} {{instance}} = rate(process_cpu_seconds_total{S}[W])
lines Failed sequences, lost spans | none | Sequences given up because a step failed, or for logits that are not finite; spans that the
    collector did not take.
  sequences, {{role}} = sum by (role) (increase(twostep_engine_failed_sequences_total{R}[W]))
  not finite, {{role}} = sum by (role) (increase(twostep_engine_non_finite_sequences_total{R}[W]))
  spans = sum(increase(twostep_trace_spans_total{S, status="lost"}[W]))
"""
