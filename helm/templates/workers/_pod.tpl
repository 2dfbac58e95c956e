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

{{/* How KV travels: what workers.kvTransfer says; where that is auto and there is no Ray, what is left between these workers. */}}
{{- define "twostep.kvTransfer" -}}
{{- if or (ne .Values.workers.kvTransfer "auto") (eq (include "twostep.rayJoined" .) "true") -}}
{{- .Values.workers.kvTransfer -}}
{{- else if .Values.colocated.enabled -}}
cuda_ipc
{{- else -}}
nixl
{{- end -}}
{{- end -}}

{{/* true where a raylet runs beside the workers. */}}
{{- define "twostep.rayJoined" -}}
{{- if .Values.ray.enabled -}}true{{- end -}}
{{- end -}}

{{/* Flags of every worker, as YAML. */}}
{{- define "twostep.workerFlags" -}}
{{- $flags := dict
  "model" .Values.model.path
  "host" "0.0.0.0"
  "device" .Values.workers.device
  "kv-transfer" (include "twostep.kvTransfer" .)
  "drain-timeout" .Values.workers.drainSeconds
-}}
{{- with .Values.model.name }}{{ $_ := set $flags "served-model-name" . }}{{ end -}}
{{- with .Values.workers.kvRingBytes }}{{ $_ := set $flags "kv-ring-bytes" . }}{{ end -}}
{{- if eq (include "twostep.rayJoined" .) "true" }}{{ $_ := set $flags "ray-address" (include "twostep.rayAddress" .) }}{{ end -}}
{{- toYaml (merge (deepCopy .Values.workers.flags) $flags) -}}
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

{{/* dict gpus: a container that asked for no GPU is to see none, whatever its image asks for. */}}
{{- define "twostep.noGpuEnv" -}}
{{- if not .gpus }}
- name: NVIDIA_VISIBLE_DEVICES
  value: void
{{- end }}
{{- end -}}

{{/* dict root, shm: bytes of shared memory */}}
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

{{/* dict root, gpus: resources that devices are counted by */}}
{{- define "twostep.deviceResources" -}}
{{- if .gpus }}
{{ .root.Values.workers.gpuResource }}: {{ .gpus }}
{{- end }}
{{- if .root.Values.rdma.enabled }}
{{ .root.Values.rdma.resource }}: {{ .root.Values.rdma.count }}
{{- end }}
{{- end -}}

{{/* dict root, gpus, resources, add: CPU, memory and devices of a worker's container */}}
{{- define "twostep.workerResources" -}}
{{- $resources := include "twostep.withMemory" (dict "resources" .resources "add" .add) | fromYaml -}}
{{- $devices := include "twostep.deviceResources" . | fromYaml -}}
{{- if $devices -}}
{{- range $kind := list "requests" "limits" -}}
{{- $_ := set $resources $kind (merge (index $resources $kind) $devices) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
