{{/* true where the chart bounds what the autoscaler may change of pods. */}}
{{- define "twostep.boundsPatches" -}}
{{- if ne (get .Values.autoscaling "podPolicy" | toString) "false" -}}true{{- end -}}
{{- end -}}

{{/* true where the autoscaler marks pods: where Kubernetes knows the policy that bounds the right to, or no policy is wanted. */}}
{{- define "twostep.marksPods" -}}
{{- if and .Values.autoscaling.podDeletionCost (or (not (include "twostep.boundsPatches" .)) (semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version)) -}}true{{- end -}}
{{- end -}}

{{/* The autoscaler's flags as the values say; autoscaling.flags win. */}}
{{- define "twostep.autoscalerFlags" -}}
{{- $scaling := .Values.autoscaling -}}
{{- $flags := dict
  "grpc-port" 50081
  "health-port" 50082
  "metrics-port" 50083
  "interval" $scaling.intervalSeconds
  "target-ttft-ms" $scaling.slo.ttftMs
  "target-tpot-ms" $scaling.slo.tpotMs
  "attainment" $scaling.slo.attainment
  "max-cost" $scaling.maxCostPerHour
  "cool-down" $scaling.coolDownSeconds
  "scale-to-zero-after" $scaling.scaleToZeroAfterSeconds
  "worker-drain" .Values.workers.drainSeconds
  "switch-roles" (ternary "1" "0" $scaling.switchRoles)
-}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := index $scaling $role -}}
{{- $flags = merge $flags (dict
  (printf "%s-min-workers" $role) $pool.minReplicas
  (printf "%s-max-workers" $role) $pool.maxReplicas
  (printf "%s-gpus-per-worker" $role) (max 1 (int64 (index $.Values $role).gpus))
  (printf "%s-price" $role) $pool.pricePerGpuHour
  (printf "%s-cold-start" $role) $pool.coldStartSeconds
) -}}
{{- end -}}
{{- if and .Values.tls.enabled (not (include "twostep.kedaSecretName" .)) -}}
{{- $flags = set $flags "tls-client-auth" "none" -}}
{{- end -}}
{{- if not (include "twostep.marksPods" .) -}}
{{- $flags = set $flags "kubernetes-api" "none" -}}
{{- end -}}
{{- toJson (merge (deepCopy $scaling.flags) $flags (include "twostep.logFlags" . | fromYaml)) -}}
{{- end -}}
