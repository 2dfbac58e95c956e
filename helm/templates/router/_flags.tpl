{{/* Flags of the routers, as YAML: what the chart settles, with router.flags over it. */}}
{{- define "twostep.routerFlags" -}}
{{- $flags := dict
  "model" .Values.model.path
  "host" "0.0.0.0"
  "port" 8000
  "grpc-port" 50051
  "health-port" 50052
  "metrics-port" 50053
  "drain-timeout" .Values.router.drainSeconds
  "target-ttft-ms" .Values.autoscaling.slo.ttftMs
  "target-tpot-ms" .Values.autoscaling.slo.tpotMs
-}}
{{- with .Values.model.name }}{{ $_ := set $flags "served-model-name" . }}{{ end -}}
{{- with .Values.model.architecture }}{{ $_ := set $flags "architecture" . }}{{ end -}}
{{- if eq .Values.auth.apiKeys "file" -}}
{{- $_ := set $flags "api-keys-file" (printf "/etc/twostep/api-keys/%s" .Values.auth.secretKey) -}}
{{- else if eq .Values.auth.apiKeys "redis" -}}
{{- $_ := set $flags "api-keys" "redis" -}}
{{- end -}}
{{- if ge (int .Values.auth.adminPort) 0 }}{{ $_ := set $flags "admin-port" .Values.auth.adminPort }}{{ end -}}
{{- if .Values.router.batches.enabled }}{{ $_ := set $flags "batch-dir" "/var/lib/twostep/batches" }}{{ end -}}
{{- if .Values.tls.enabled }}{{ $_ := set $flags "tls-client-auth" (ternary "require" "none" .Values.tls.clientCertificates) }}{{ end -}}
{{- toYaml (merge (deepCopy .Values.router.flags) $flags (include "twostep.logFlags" . | fromYaml)) -}}
{{- end -}}
