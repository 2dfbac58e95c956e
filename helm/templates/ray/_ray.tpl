{{/* Ray: where its head is, its token, and the raylet beside a worker. */}}

{{- define "twostep.rayAddress" -}}
{{- if eq .Values.ray.mode "external" -}}
{{- .Values.ray.address -}}
{{- else -}}
{{- printf "%s:%v" (include "twostep.component" (dict "root" . "component" "ray-head")) .Values.ray.ports.gcs -}}
{{- end -}}
{{- end -}}

{{/* Token authentication, for raylets, KV agents (which have their worker's environment) and the head alike. */}}
{{- define "twostep.rayAuthEnv" -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN_PATH
  value: /etc/twostep/ray/ray-token
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
# The kernel keeps a pod within its limits. Ray would count its neighbours' memory, and kill agents for it.
- name: RAY_memory_monitor_refresh_ms
  value: "0"
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: {{ .Values.ray.reconnectSeconds | quote }}
{{- end -}}

{{- define "twostep.rayAuthMounts" -}}
- name: ray-token
  mountPath: /etc/twostep/ray
  readOnly: true
{{- end -}}

{{- define "twostep.rayAuthVolumes" -}}
- name: ray-token
  secret:
    secretName: {{ include "twostep.secretName" . }}
    defaultMode: 0440
    items:
      - key: ray-token
        path: ray-token
{{- end -}}

{{/* Flags of kv_transfer.ray.node that head and raylets share. */}}
{{- define "twostep.rayNodeEnv" -}}
{{- include "twostep.flagEnv" (dict "flags" (include "twostep.logFlags" . | fromYaml)) }}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: TWOSTEP_RAY_ADDRESS
  value: {{ include "twostep.rayAddress" . | quote }}
- name: TWOSTEP_RAY_NODE_IP
  value: $(POD_IP)
- name: TWOSTEP_RAY_TEMP_DIR
  value: /tmp/ray
- name: TWOSTEP_RAY_FIRST_PORT
  value: {{ .Values.ray.ports.first | quote }}
- name: TWOSTEP_RAY_WORKER_PORTS
  value: {{ .Values.ray.ports.workers | quote }}
{{- end -}}

{{/* The last port of a Ray node: as kv_transfer/ray/node.py counts them. */}}
{{- define "twostep.rayLastPort" -}}
{{- sub (add (int .Values.ray.ports.first) 9 (int .Values.ray.ports.workers)) 1 -}}
{{- end -}}

{{/* dict root, health: the worker's health port. The raylet outlives its worker's drain: what prefill has published lies in its store. */}}
{{- define "twostep.raylet" -}}
{{- $root := .root -}}
- name: raylet
  image: {{ include "twostep.image" (dict "root" $root "image" "worker") }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [python, -P, -m, kv_transfer.ray.node]
  env:
    {{- include "twostep.commonEnv" $root | nindent 4 }}
    # Without a GPU of its own: the image asks for all of them.
    - name: NVIDIA_VISIBLE_DEVICES
      value: void
    {{- include "twostep.workerEnv" $root | nindent 4 }}
    {{- include "twostep.rayAuthEnv" $root | nindent 4 }}
    {{- include "twostep.rayNodeEnv" $root | nindent 4 }}
    - name: TWOSTEP_RAY_STORE_BYTES
      value: {{ include "twostep.bytes" $root.Values.ray.objectStore | quote }}
  lifecycle:
    preStop:
      exec:
        command:
          - python
          - -c
          - |
            import socket, time
            end = time.monotonic() + {{ add $root.Values.workers.drainSeconds 20 }}
            while time.monotonic() < end:
                try:
                    socket.create_connection(("127.0.0.1", {{ .health }}), timeout=2).close()
                except OSError:
                    break
                time.sleep(0.5)
  securityContext:
    {{- include "twostep.containerSecurityContext" $root | nindent 4 }}
  resources:
    {{- include "twostep.withMemory" (dict "resources" $root.Values.ray.raylet.resources "add" (include "twostep.bytes" $root.Values.ray.objectStore)) | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: shm
      mountPath: /dev/shm
    {{- include "twostep.rayAuthMounts" $root | nindent 4 }}
{{- end -}}
