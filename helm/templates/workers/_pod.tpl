{{/* What pods with workers share: flags, environment, volumes, the raylet beside them. */}}

{{/* dict of a requests/limits map and add, bytes on top of its memory: the same map with the sum, in whole MiB */}}
{{- define "twostep.withMemory" -}}
{{- $add := int64 .add -}}
{{- $resources := deepCopy .resources -}}
{{- range $kind := list "requests" "limits" -}}
{{- $part := index $resources $kind | default dict -}}
{{- if not (hasKey $part "memory") -}}
{{- fail (printf "resources.%s of every container with shared memory must say how much memory it has: the shared memory is added to it" $kind) -}}
{{- end -}}
{{- $sum := add (int64 (include "twostep.bytes" $part.memory)) $add -}}
{{- $_ := set $part "memory" (printf "%dMi" (div (add $sum 1048575) 1048576)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The pools of workers that there are, behind each other. */}}
{{- define "twostep.pools" -}}
{{- $colocated := .Values.colocated -}}
{{- if or (not $colocated.enabled) $colocated.besidePools }}prefill decode{{ if $colocated.enabled }} {{ end }}{{ end -}}
{{- if $colocated.enabled }}colocated{{ end -}}
{{- end -}}

{{/* dict root, component: how KV travels from and to a pool's workers: what workers.kvTransfer says; where that is auto and there is no Ray,
     what is left between these. */}}
{{- define "twostep.kvTransfer" -}}
{{- $values := .root.Values -}}
{{- if or (ne $values.workers.kvTransfer "auto") (eq (include "twostep.rayJoined" .root) "true") -}}
{{- $values.workers.kvTransfer -}}
{{- else if ne .component "colocated" -}}
nixl
{{- else -}}
cuda_ipc{{ if $values.colocated.besidePools }},nixl{{ end }}
{{- end -}}
{{- end -}}

{{/* true where a raylet runs beside the workers. */}}
{{- define "twostep.rayJoined" -}}
{{- if .Values.ray.enabled -}}true{{- end -}}
{{- end -}}

{{/* dict root, component: flags of a pool's workers, as YAML. */}}
{{- define "twostep.workerFlags" -}}
{{- $root := .root -}}
{{- $flags := dict
  "model" $root.Values.model.path
  "host" "0.0.0.0"
  "device" $root.Values.workers.device
  "kv-transfer" (include "twostep.kvTransfer" .)
  "drain-timeout" $root.Values.workers.drainSeconds
-}}
{{- with $root.Values.model.name }}{{ $_ := set $flags "served-model-name" . }}{{ end -}}
{{- with $root.Values.model.architecture }}{{ $_ := set $flags "architecture" . }}{{ end -}}
{{- with $root.Values.workers.kvRingBytes }}{{ $_ := set $flags "kv-ring-bytes" . }}{{ end -}}
{{- if eq (include "twostep.rayJoined" $root) "true" }}{{ $_ := set $flags "ray-address" (include "twostep.rayAddress" $root) }}{{ end -}}
{{- toYaml (merge (deepCopy $root.Values.workers.flags) $flags (include "twostep.logFlags" $root | fromYaml)) -}}
{{- end -}}

{{/* Which pod this is. The names that others refer to come first. */}}
{{- define "twostep.podEnv" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: TWOSTEP_POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: TWOSTEP_POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
{{- end -}}

{{/* Writable places of a worker: /tmp also has Ray's sockets and logs, the KV agent's socket and Triton's kernels. */}}
{{- define "twostep.workerEnv" -}}
- name: XDG_CACHE_HOME
  value: /tmp/cache
- name: TRITON_CACHE_DIR
  value: /tmp/cache/triton
- name: TORCHINDUCTOR_CACHE_DIR
  value: /tmp/cache/inductor
{{- end -}}

{{/* dict own (the pool's settings), gpus: a container that asked the device plugin for no GPU is to see none by NVIDIA's runtime, whatever
     its image asks for. What a claim (DRA) brings, comes past that. */}}
{{- define "twostep.noGpuEnv" -}}
{{- if or (not .gpus) (eq .own.gpuResource "none") }}
- name: NVIDIA_VISIBLE_DEVICES
  value: void
{{- end }}
{{- end -}}

{{/* dict root, component, shm: bytes of shared memory */}}
{{- define "twostep.workerVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .root.Values.workers.scratch }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ printf "%dMi" (div (add (int64 .shm) 1048575) 1048576) }}
{{ include "twostep.trustVolumes" .root }}
{{ include "twostep.modelVolumes" .root }}
{{ include "twostep.kernelCacheVolume" . }}
{{- end -}}

{{- define "twostep.workerMounts" -}}
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
{{ include "twostep.trustMounts" . }}
{{ include "twostep.modelMounts" . }}
{{- end -}}

{{/* RDMA between nodes needs to pin memory beyond the limit that containers have. */}}
{{- define "twostep.workerSecurityContext" -}}
{{- if .Values.rdma.enabled -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
  add: [IPC_LOCK]
{{- else -}}
{{- include "twostep.containerSecurityContext" . -}}
{{- end -}}
{{- end -}}

{{/* dict root, own, gpus: resources that devices are counted by */}}
{{- define "twostep.deviceResources" -}}
{{- if and .gpus (ne .own.gpuResource "none") }}
{{ .own.gpuResource }}: {{ .gpus }}
{{- end }}
{{- if .root.Values.rdma.enabled }}
{{ .root.Values.rdma.resource }}: {{ .root.Values.rdma.count }}
{{- end }}
{{- end -}}

{{/* dict root, own (the pool's settings), gpus, add: CPU, memory and devices of a worker's container; it has all that its pod claims */}}
{{- define "twostep.workerResources" -}}
{{- $disk := prepend (include "twostep.modelDisk" .root | fromJsonArray) .root.Values.workers.scratch -}}
{{- $memory := include "twostep.withMemory" (dict "resources" .own.resources "add" .add) | fromYaml -}}
{{- $resources := include "twostep.withDisk" (dict "resources" $memory "disk" $disk) | fromYaml -}}
{{- $devices := include "twostep.deviceResources" . | fromYaml -}}
{{- if $devices -}}
{{- range $kind := list "requests" "limits" -}}
{{- $_ := set $resources $kind (merge (index $resources $kind) $devices) -}}
{{- end -}}
{{- end -}}
{{- range .own.resourceClaims -}}
{{- $_ := set $resources "claims" (append ($resources.claims | default list) (pick . "name")) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
