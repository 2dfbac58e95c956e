{{/* Small objects and parts of pods that several components have. */}}

{{/* dict root, component, maxUnavailable */}}
{{- define "twostep.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "twostep.component" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "twostep.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .maxUnavailable }}
  selector:
    matchLabels:
      {{- include "twostep.selectorLabels" . | nindent 6 }}
{{- end -}}

{{/* dict root, component, size, storageClass, accessModes: a claim that stays when the release goes */}}
{{- define "twostep.claim" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ include "twostep.component" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "twostep.labels" . | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
spec:
  accessModes:
    {{- toYaml .accessModes | nindent 4 }}
  {{- with .storageClass }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests:
      storage: {{ .size }}
{{- end -}}

{{/* dict component (a dict of root, component), given: constraints of the values, else over nodes, then zones, as far as possible */}}
{{- define "twostep.spread" -}}
topologySpreadConstraints:
{{- if .given }}
  {{- toYaml .given | nindent 2 }}
{{- else }}
{{- $component := .component }}
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "twostep.selectorLabels" $component | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* dict root, port (of the metrics) */}}
{{- define "twostep.podAnnotations" -}}
{{- $annotations := deepCopy .root.Values.podAnnotations -}}
{{- if and .root.Values.monitoring.annotations .port -}}
{{- $annotations = merge $annotations (dict "prometheus.io/scrape" "true" "prometheus.io/path" "/metrics" "prometheus.io/port" (toString .port)) -}}
{{- end -}}
{{- with $annotations -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Of hook Jobs: without a mesh's sidecar, which would not end, so that the Job would not either. They reach nothing but the API server. */}}
{{- define "twostep.hookPodAnnotations" -}}
annotations:
  {{- toYaml (merge (dict "sidecar.istio.io/inject" "false" "linkerd.io/inject" "disabled") .Values.podAnnotations) | nindent 2 }}
{{- end -}}

{{/* dict root, component: an account that may do nothing and has no token in its pods */}}
{{- define "twostep.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "twostep.serviceAccountName" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "twostep.labels" . | nindent 4 }}
  {{- with .root.Values.serviceAccounts.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end -}}
