{{/* The head's container without name and command, for the chart's Deployment and for KubeRay's RayCluster. */}}
{{- define "twostep.rayHeadContainer" -}}
image: {{ include "twostep.image" (dict "root" . "image" "worker") }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  {{- include "twostep.commonEnv" . | nindent 2 }}
  # Without a GPU of its own: the image asks for all of them.
  - name: NVIDIA_VISIBLE_DEVICES
    value: void
  {{- include "twostep.rayAuthEnv" . | nindent 2 }}
  {{- if eq .Values.ray.mode "chart" }}
  {{- include "twostep.rayNodeEnv" . | nindent 2 }}
  - name: TWOSTEP_RAY_CLIENT_PORT
    value: {{ .Values.ray.ports.client | quote }}
  {{- include "twostep.rayRedisEnv" . | nindent 2 }}
  {{- end }}
ports:
  - name: gcs
    containerPort: {{ .Values.ray.ports.gcs }}
securityContext:
  {{- include "twostep.containerSecurityContext" . | nindent 2 }}
resources:
  {{- toYaml .Values.ray.head.resources | nindent 2 }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  - name: shm
    mountPath: /dev/shm
  {{- include "twostep.rayAuthMounts" . | nindent 2 }}
{{- end -}}

{{- define "twostep.rayHeadVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 2Gi
# The head has a raylet too, on which nothing runs.
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: 256Mi
{{ include "twostep.rayAuthVolumes" . }}
{{- end -}}

{{/* Where the GCS keeps its state. Without an address it is lost with the head, and workers join the new one as strangers. */}}
{{- define "twostep.rayRedisEnv" -}}
{{- if .Values.redis.embedded }}
- name: RAY_REDIS_ADDRESS
  value: {{ include "twostep.redisHost" . }}:6379
- name: TWOSTEP_RAY_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "twostep.secretName" . }}
      key: redis-password
{{- else if .Values.redis.external.address }}
- name: RAY_REDIS_ADDRESS
  value: {{ .Values.redis.external.address | quote }}
{{- with .Values.redis.external.passwordKey }}
- name: TWOSTEP_RAY_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $.Values.redis.external.existingSecret }}
      key: {{ . }}
{{- end }}
{{- end }}
# Ray's keys stand apart from everything else in that Redis, and from those of another release.
- name: RAY_external_storage_namespace
  value: {{ printf "%s-%s" .Release.Namespace (include "twostep.fullname" .) }}
{{- end -}}
