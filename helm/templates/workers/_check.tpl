{{/* What values.schema.json cannot say: values that contradict each other. */}}
{{- define "twostep.check" -}}
{{- $transfer := include "twostep.kvTransfer" . -}}
{{- if and .Values.colocated.enabled .Values.autoscaling.enabled -}}
{{- fail "autoscaling.enabled moves the replicas of the prefill and decode Deployments, and with colocated.enabled there are none: switch one of them off" -}}
{{- end -}}
{{- if and (eq .Values.model.volume.type "emptyDir") (not .Values.model.loader.enabled) -}}
{{- fail "model.volume.type emptyDir begins empty: set model.loader.enabled and model.loader.command, or another type" -}}
{{- end -}}
{{- if and .Values.model.loader.enabled (not .Values.model.loader.command) -}}
{{- fail "model.loader.enabled needs model.loader.command: what puts the model into MODEL_PATH" -}}
{{- end -}}
{{- if and .Values.model.loader.enabled (has .Values.model.volume.type (list "image" "hostPath")) -}}
{{- fail (printf "model.loader writes to /models, and model.volume.type %s is not written to: use pvc or emptyDir" .Values.model.volume.type) -}}
{{- end -}}
{{- if and (contains "ray" $transfer) (not .Values.ray.enabled) -}}
{{- fail (printf "workers.kvTransfer is %q and ray.enabled is false: enable Ray, or leave ray out" $transfer) -}}
{{- end -}}
{{- if and .Values.colocated.enabled (eq $transfer "cuda_ipc") (gt (int .Values.colocated.gpusPerWorker) 1) -}}
{{- fail "CUDA IPC reads a pool on one GPU: with colocated.gpusPerWorker above 1 enable Ray" -}}
{{- end -}}
{{- if and .Values.colocated.enabled (eq $transfer "cuda_ipc") (not .Values.colocated.gpusPerWorker) -}}
{{- fail "CUDA IPC is for GPUs: with colocated.gpusPerWorker 0 enable Ray" -}}
{{- end -}}
{{- if and .Values.colocated.enabled (eq $transfer "cuda_ipc") (gt (int .Values.colocated.replicas) 1) -}}
{{- fail "CUDA IPC joins workers of one pod: with colocated.replicas above 1 enable Ray for the pairs of two pods" -}}
{{- end -}}
{{- if and (eq .Values.ray.mode "external") .Values.ray.enabled (not .Values.ray.address) -}}
{{- fail "ray.mode is external: give ray.address, host:port of its GCS" -}}
{{- end -}}
{{- if and (not .Values.colocated.enabled) (eq $transfer "nixl") (not .Values.prefill.gpus) (or .Values.autoscaling.enabled (gt (int .Values.prefill.replicas) 0)) -}}
{{- fail "without ray.enabled KV travels by nixl, and workers without GPUs have no nixl: enable Ray, or set prefill.replicas to 0 and workers.kvTransfer to none" -}}
{{- end -}}
{{- if and (eq .Values.ray.mode "external") .Values.ray.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.rayFrom) -}}
{{- fail "ray.mode is external, and its head must reach the raylets: give networkPolicy.rayFrom, who it is" -}}
{{- end -}}
{{- $rollouts := ternary (dict "colocated" .Values.colocated) (dict "prefill" .Values.prefill "decode" .Values.decode) .Values.colocated.enabled -}}
{{- range $name, $pool := $rollouts -}}
{{- if and (has (toString $pool.maxSurge) (list "0" "0%")) (has (toString $pool.maxUnavailable) (list "0" "0%")) -}}
{{- fail (printf "%s.maxSurge and %s.maxUnavailable are both 0, and no pod could ever be replaced: set one of them to 1" $name $name) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $transfer "none") .Values.autoscaling.enabled -}}
{{- fail "workers.kvTransfer none leaves prefill workers nothing to do, and the autoscaler would make some: set autoscaling.enabled to false" -}}
{{- end -}}
{{- if and (eq $transfer "none") (gt (int .Values.prefill.replicas) 0) -}}
{{- fail "workers.kvTransfer none leaves prefill workers nothing to do: set prefill.replicas to 0" -}}
{{- end -}}
{{- end -}}
