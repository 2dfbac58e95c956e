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

{{/* Seconds until the pod of `helm test` is ended, whatever it does. */}}
{{- define "twostep.testDeadline" -}}
{{- add .Values.tests.timeoutSeconds 60 -}}
{{- end -}}

{{/* Seconds that one worker may take to give place to the next and that one to be ready, images and what waits for it included: a Deployment
     counts as stuck after it. */}}
{{- define "twostep.readySeconds" -}}
{{- add .Values.workers.startupSeconds .Values.workers.drainSeconds 300 -}}
{{- end -}}

{{/* dict root, replicas: what --timeout of `helm install` (1) or `helm upgrade` must say with --wait, as in 37m */}}
{{- define "twostep.waitTime" -}}
{{- printf "%dm" (div (add (mul (include "twostep.readySeconds" .root | int64) (int64 .replicas)) 59) 60) -}}
{{- end -}}

{{/* The most pods of one role, which an upgrade replaces one after another. */}}
{{- define "twostep.mostWorkers" -}}
{{- if .Values.colocated.enabled -}}
{{- max 1 (int .Values.colocated.replicas) -}}
{{- else if .Values.autoscaling.enabled -}}
{{- max 1 (int .Values.autoscaling.prefill.maxReplicas) (int .Values.autoscaling.decode.maxReplicas) -}}
{{- else -}}
{{- max 1 (int .Values.prefill.replicas) (int .Values.decode.replicas) -}}
{{- end -}}
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

{{/* Takes the kind: Job, or what a hook Job needs. When a Job fails, Helm 3 takes nothing away, and an uninstall knows no hooks but its own. So
     what a Job needs, its rights above all, is a hook of rollbacks and of the uninstall, too: made anew there and taken away. The Job stays,
     with its log, until the next run or until twostep.hookTimes. */}}
{{- define "twostep.hookAnnotations" -}}
helm.sh/hook: pre-install,pre-upgrade{{ if ne . "Job" }},post-rollback,post-delete{{ end }}
helm.sh/hook-weight: {{ ternary "-5" "-10" (eq . "Job") | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- if eq . "Job" }}
# Newer versions of Helm print the log.
helm.sh/hook-output-log-policy: hook-failed
{{- end }}
{{- end -}}

{{/* Of hook Jobs. Helm waits for five minutes unless told otherwise, and then says only that it has waited: the Job ends before, with its
     reason. One that failed is gone after a day. */}}
{{- define "twostep.hookTimes" -}}
activeDeadlineSeconds: 240
ttlSecondsAfterFinished: 86400
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
