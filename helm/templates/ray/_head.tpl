{{/* The head's container without name and command, for the chart's Deployment and for KubeRay's RayCluster. dict root, own: its
     settings */}}
{{- define "twostep.rayHeadContainer" -}}
{{- $root := .root -}}
image: {{ include "twostep.image" (dict "root" $root "image" "worker") }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
env:
  {{- include "twostep.commonEnv" $root | nindent 2 }}
  # Without a GPU of its own: the image asks for all of them.
  - name: NVIDIA_VISIBLE_DEVICES
    value: void
  {{- include "twostep.rayAuthEnv" $root | nindent 2 }}
  {{- if eq $root.Values.ray.mode "chart" }}
  {{- include "twostep.rayNodeEnv" $root | nindent 2 }}
  - name: TWOSTEP_RAY_CLIENT_PORT
    value: {{ $root.Values.ray.ports.client | quote }}
  {{- include "twostep.rayRedisEnv" $root | nindent 2 }}
  {{- end }}
  {{- include "twostep.elements" .own.env | nindent 2 }}
{{- include "twostep.fields" (list .own "envFrom") }}
ports:
  - name: gcs
    containerPort: {{ $root.Values.ray.ports.gcs }}
securityContext:
  {{- include "twostep.containerSecurityContext" $root | nindent 2 }}
resources:
  {{- include "twostep.withDisk" (dict "resources" $root.Values.ray.head.resources "disk" (list "2Gi")) | nindent 2 }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  - name: shm
    mountPath: /dev/shm
  {{- include "twostep.rayAuthMounts" $root | nindent 2 }}
  {{- if include "twostep.rayRedisPassword" $root }}
  - name: redis-password
    mountPath: /etc/twostep/redis
    readOnly: true
  {{- end }}
  {{- include "twostep.elements" .own.extraVolumeMounts | nindent 2 }}
{{- end -}}

{{/* true where the chart's own head shows Redis a password. */}}
{{- define "twostep.rayRedisPassword" -}}
{{- if and (eq .Values.ray.mode "chart") (or .Values.redis.embedded (and .Values.redis.external.address .Values.redis.external.passwordKey)) -}}true{{- end -}}
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
{{- if include "twostep.rayRedisPassword" . }}
- name: redis-password
  secret:
    secretName: {{ ternary (include "twostep.secretName" .) .Values.redis.external.existingSecret .Values.redis.embedded }}
    defaultMode: 0440
    items:
      - key: {{ ternary "redis-password" .Values.redis.external.passwordKey .Values.redis.embedded }}
        path: password
{{- end }}
{{- end -}}

{{/* Where the GCS keeps its state. Without an address it is lost with the head, and workers join the new one as strangers. */}}
{{- define "twostep.rayRedisEnv" -}}
{{- if .Values.redis.embedded }}
- name: RAY_REDIS_ADDRESS
  value: {{ include "twostep.redisHost" . }}:6379
- name: TWOSTEP_RAY_REDIS_PASSWORD_FILE
  value: /etc/twostep/redis/password
{{- else if .Values.redis.external.address }}
- name: RAY_REDIS_ADDRESS
  value: {{ .Values.redis.external.address | quote }}
{{- if .Values.redis.external.passwordKey }}
- name: TWOSTEP_RAY_REDIS_PASSWORD_FILE
  value: /etc/twostep/redis/password
{{- end }}
{{- end }}
# Ray's keys stand apart from everything else in that Redis, and from those of another release.
- name: RAY_external_storage_namespace
  value: {{ printf "%s-%s" .Release.Namespace (include "twostep.fullname" .) }}
{{- end -}}
