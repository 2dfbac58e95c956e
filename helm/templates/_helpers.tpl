{{/* Names, labels, selectors, images. Each takes the root context, or a dict of root and what it says. */}}

{{- define "twostep.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "twostep.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- include "twostep.dnsLabel" .Values.fullnameOverride -}}
{{- else if contains (include "twostep.name" .) .Release.Name -}}
{{- include "twostep.dnsLabel" .Release.Name -}}
{{- else -}}
{{- include "twostep.dnsLabel" (printf "%s-%s" .Release.Name (include "twostep.name" .)) -}}
{{- end -}}
{{- end -}}

{{/* A text as a name that Services may begin with: a letter first, no dots, 40 characters at most, since components are named behind it.
     Whatever is not so already ends in a hash, so that two texts never become one name. */}}
{{- define "twostep.dnsLabel" -}}
{{- if and (le (len .) 40) (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .) -}}
{{- . -}}
{{- else -}}
{{- $start := regexReplaceAll "[^a-z0-9]+" (lower .) "-" | trimAll "-" -}}
{{- if not (regexMatch "^[a-z]" $start) }}{{ $start = printf "r%s" $start }}{{ end -}}
{{- printf "%s-%s" ($start | trunc 31 | trimSuffix "-") (sha256sum . | trunc 8) -}}
{{- end -}}
{{- end -}}

{{/* dict root, component: the name of a component's objects, such as demo-twostep-router */}}
{{- define "twostep.component" -}}
{{- printf "%s-%s" (include "twostep.fullname" .root) .component -}}
{{- end -}}

{{/* dict root, component */}}
{{- define "twostep.selectorLabels" -}}
app.kubernetes.io/name: {{ include "twostep.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* dict root, component: the labels of an object. */}}
{{- define "twostep.labels" -}}
{{- $own := include "twostep.settings" . | fromYaml -}}
{{- $chart := dict
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/managed-by" .root.Release.Service
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_")
-}}
{{- $finding := merge (include "twostep.selectorLabels" . | fromYaml) (include "twostep.releaseLabels" .root | fromYaml) -}}
{{- toYaml (merge $finding $chart $own.labels (.root.Values.commonLabels | default dict)) -}}
{{- end -}}

{{/* dict root, component: the labels of a pod. Nothing that changes with each release of the chart: pods would restart for it. */}}
{{- define "twostep.podLabels" -}}
{{- $own := include "twostep.settings" . | fromYaml -}}
{{- $finding := merge (include "twostep.selectorLabels" . | fromYaml) (include "twostep.releaseLabels" .root | fromYaml) -}}
{{- toYaml (merge $finding $own.podLabels (.root.Values.commonLabels | default dict)) -}}
{{- end -}}

{{/* dict root, component; name: where it is not the component's; annotations: its own, a map. The metadata of an object. */}}
{{- define "twostep.metadata" -}}
{{- $own := include "twostep.settings" . | fromYaml -}}
name: {{ default (include "twostep.component" .) .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "twostep.labels" . | nindent 2 }}
{{- include "twostep.fields" (list (dict "annotations" (merge (dict) (.annotations | default dict) $own.annotations)) "annotations") }}
{{- end -}}

{{/* dict root, image: router, worker or redis. A repository that begins with a host is where it says. */}}
{{- define "twostep.image" -}}
{{- $image := index .root.Values.image .image -}}
{{- $repository := $image.repository -}}
{{- if regexMatch "(:[^/]*|@.*)$" $repository -}}
{{- fail (printf "image.%s.repository is %s, with a tag or digest in it: give that as image.%s.tag or image.%s.digest" .image $repository .image .image) -}}
{{- end -}}
{{- $registry := default (get $image "registry") .root.Values.image.registry -}}
{{- if and $registry (not (regexMatch "^(localhost|[^/]*[.:][^/]*)/" $repository)) -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" $registry) $repository -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* dict root, component: ServiceAccounts carry their component's name */}}
{{- define "twostep.serviceAccountName" -}}
{{- include "twostep.component" . -}}
{{- end -}}

{{/* ---- security: what the `restricted` Pod Security level asks for, and a root file system that nobody writes to ---- */}}

{{- define "twostep.podSecurityContext" -}}
runAsNonRoot: true
{{- range $name := list "runAsUser" "runAsGroup" "fsGroup" }}
{{- with index $.Values.podSecurity $name }}
{{ $name }}: {{ int64 . }}
{{- end }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "twostep.containerSecurityContext" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* ---- secrets ---- */}}

{{/* The key of the deployment secret. */}}
{{- define "twostep.deploymentKey" -}}
{{- $key := .Values.secrets.deploymentKey | default "deployment-secret" -}}
{{- if eq $key (.Values.secrets.formerDeploymentKey | default "") -}}
{{- fail (printf "secrets.deploymentKey and secrets.formerDeploymentKey are both %s: give the former secret's key, or none" $key) -}}
{{- end -}}
{{- $key -}}
{{- end -}}

{{/* The Secret with the deployment secret, ray-token and redis-password. */}}
{{- define "twostep.secretName" -}}
{{- default (include "twostep.component" (dict "root" . "component" "secrets")) .Values.secrets.existingSecret -}}
{{- end -}}

{{/* The Secret with tls.crt, tls.key and ca.crt, wherever it comes from. */}}
{{- define "twostep.tlsSecretName" -}}
{{- if eq .Values.tls.source "secret" -}}
{{- required "tls.source is secret: give tls.existingSecret, the name of a Secret with tls.crt, tls.key and ca.crt" .Values.tls.existingSecret -}}
{{- else -}}
{{- include "twostep.component" (dict "root" . "component" "tls") -}}
{{- end -}}
{{- end -}}

{{/* The Secret with KEDA's own certificate and key, and their authority; empty where KEDA shows none. That authority is none of the workers':
     whoever reads the Secret can ask the autoscaler, and call nobody else. */}}
{{- define "twostep.kedaSecretName" -}}
{{- if not .Values.tls.enabled -}}
{{- else if .Values.tls.kedaSecret -}}
{{- if eq .Values.tls.kedaSecret (include "twostep.tlsSecretName" .) -}}
{{- fail (printf "tls.kedaSecret is %s, the Secret of the processes' own certificate, and KEDA's key could call workers: give one of another authority, or none" .Values.tls.kedaSecret) -}}
{{- end -}}
{{- .Values.tls.kedaSecret -}}
{{- else if ne .Values.tls.source "secret" -}}
{{- include "twostep.component" (dict "root" . "component" "keda") -}}
{{- end -}}
{{- end -}}

{{/* true where the chart is to make that Secret. */}}
{{- define "twostep.makesKedaSecret" -}}
{{- if and .Values.tls.enabled .Values.autoscaling.enabled (not .Values.tls.kedaSecret) (ne .Values.tls.source "secret") -}}true{{- end -}}
{{- end -}}

{{/* What workers' certificates are checked for, whatever address they are reached at: pods have no names of their own. */}}
{{- define "twostep.tlsPeerName" -}}
{{- include "twostep.component" (dict "root" . "component" "peer") -}}
{{- end -}}

{{/* Names that the certificate must have, one a line. */}}
{{- define "twostep.tlsDnsNames" -}}
{{- $root := . -}}
{{- $names := list (include "twostep.tlsPeerName" .) "localhost" -}}
{{- range $component := list "router" "router-headless" "autoscaler" -}}
{{- $name := include "twostep.component" (dict "root" $root "component" $component) -}}
{{- $names = concat $names (list $name (printf "%s.%s" $name $root.Release.Namespace) (printf "%s.%s.svc" $name $root.Release.Namespace) (printf "%s.%s.svc.%s" $name $root.Release.Namespace $root.Values.clusterDomain)) -}}
{{- end -}}
{{- concat $names .Values.tls.extraDnsNames | uniq | join "\n" -}}
{{- end -}}

{{/* ---- environment ---- */}}

{{/* dict root, flags: a map of flags (kebab-case, without --) as environment, sorted. Lists and maps travel as JSON. */}}
{{- define "twostep.flagEnv" -}}
{{- range $flag, $value := .flags }}
- name: {{ printf "TWOSTEP_%s" ($flag | replace "-" "_" | upper) }}
  value: {{ include "twostep.text" $value | quote }}
{{- end }}
{{- end -}}

{{/* A value as a flag has it: whole numbers without the exponent that YAML's readers give large ones. */}}
{{- define "twostep.text" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else if or (kindIs "slice" .) (kindIs "map" .) -}}
{{- toJson . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* Flags of every process, as YAML. */}}
{{- define "twostep.logFlags" -}}
log-level: {{ .Values.logLevel }}
log-json: {{ ternary "1" "0" .Values.logJson | quote }}
{{- end -}}

{{/* What every process of ours has. */}}
{{- define "twostep.commonEnv" -}}
- name: HOME
  value: /tmp
- name: USER
  value: twostep
{{- end -}}

{{/* Of those that have spans to send. */}}
{{- define "twostep.tracingEnv" -}}
{{- with .Values.tracing.otlpEndpoint }}
- name: TWOSTEP_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Where Redis is. The password stands in no object but the Secret. */}}
{{- define "twostep.redisEnv" -}}
{{- if .Values.redis.embedded }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "twostep.secretName" . }}
      key: redis-password
- name: TWOSTEP_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "twostep.redisHost" . }}:6379/0
{{- else }}
- name: TWOSTEP_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ required "redis.embedded is false: give redis.external.existingSecret, the name of a Secret with the URL of your Redis" .Values.redis.external.existingSecret }}
      key: {{ .Values.redis.external.urlKey }}
{{- end }}
{{- end -}}

{{- define "twostep.redisHost" -}}
{{- include "twostep.component" (dict "root" . "component" "redis") -}}
{{- end -}}

{{/* The deployment secret and TLS. Goes with twostep.trustVolumes and twostep.trustMounts. */}}
{{- define "twostep.trustEnv" -}}
{{- include "twostep.trustEnvWith" (dict "root" . "ca" "/etc/twostep/tls/ca.crt") }}
{{- end -}}

{{/* dict root, ca: the file of the authorities that peers must be certified by */}}
{{- define "twostep.trustEnvWith" -}}
- name: TWOSTEP_SECRET_FILE
  value: /etc/twostep/secret/deployment-secret
{{- if .root.Values.secrets.formerDeploymentKey }}
- name: TWOSTEP_FORMER_SECRET_FILE
  value: /etc/twostep/secret/former-deployment-secret
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: TWOSTEP_TLS_CERT
  value: /etc/twostep/tls/tls.crt
- name: TWOSTEP_TLS_KEY
  value: /etc/twostep/tls/tls.key
- name: TWOSTEP_TLS_CA
  value: {{ .ca }}
- name: TWOSTEP_TLS_PEER_NAME
  value: {{ include "twostep.tlsPeerName" .root }}
{{- end }}
{{- end -}}

{{- define "twostep.trustMounts" -}}
- name: secret
  mountPath: /etc/twostep/secret
  readOnly: true
{{- if .Values.tls.enabled }}
- name: tls
  mountPath: /etc/twostep/tls
  readOnly: true
{{- end }}
{{- end -}}

{{- define "twostep.trustVolumes" -}}
- name: secret
  secret:
    secretName: {{ include "twostep.secretName" . }}
    defaultMode: 0440
    items:
      - key: {{ include "twostep.deploymentKey" . }}
        path: deployment-secret
      {{- with .Values.secrets.formerDeploymentKey }}
      - key: {{ . }}
        path: former-deployment-secret
      {{- end }}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "twostep.tlsSecretName" . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{/* ---- quantities ---- */}}

{{/* A quantity of memory as Kubernetes reads it (8Gi, 1.5Gi, 512Mi, 1G, a number) in bytes, rounded up as there. */}}
{{- define "twostep.bytes" -}}
{{- $text := include "twostep.text" . -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "" 1 "m" 0.001 -}}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- if or (eq $number "") (not (hasKey $units $unit)) -}}
{{- fail (printf "%q is no quantity of memory that this chart can add up; give a number with Ki, Mi, Gi or Ti, such as 8Gi" $text) -}}
{{- end -}}
{{- ceil (mulf (float64 $number) (float64 (index $units $unit))) | int64 -}}
{{- end -}}

{{/* dict root, resources, disk: sizes of the pod's emptyDirs on disk. The requests and limits, with room for these on the node, unless they
     say how much ephemeral-storage it is to be. */}}
{{- define "twostep.withDisk" -}}
{{- $resources := deepCopy (.resources | default dict) -}}
{{- $requests := get $resources "requests" | default dict -}}
{{- $sum := 0 -}}
{{- range .disk }}{{ $sum = add $sum (include "twostep.bytes" . | int64) }}{{ end -}}
{{- if not (hasKey $requests "ephemeral-storage") }}{{ $_ := set $requests "ephemeral-storage" (printf "%dMi" (div (add $sum 1048575) 1048576)) }}{{ end -}}
{{- toYaml (set $resources "requests" $requests) -}}
{{- end -}}

{{/* What the model takes of a pod's disk: as list, JSON. */}}
{{- define "twostep.modelDisk" -}}
{{- $volume := .Values.model.volume -}}
{{- ternary (list $volume.sizeLimit) list (eq $volume.type "emptyDir") | toJson -}}
{{- end -}}

{{/* An amount of memory as Redis reads it, in bytes: k, m and g are thousands, kb, mb and gb are 1024s, in either case. */}}
{{- define "twostep.redisBytes" -}}
{{- $text := include "twostep.text" . | lower -}}
{{- $units := dict "k" 1000 "m" 1000000 "g" 1000000000 "kb" 1024 "mb" 1048576 "gb" 1073741824 "b" 1 "" 1 -}}
{{- $number := regexFind "^[0-9]+" $text -}}
{{- mul (int64 $number) (int64 (get $units (trimPrefix $number $text))) -}}
{{- end -}}

{{/* true where there may be no worker at all, and a request is what makes one. */}}
{{- define "twostep.toZero" -}}
{{- if and .Values.autoscaling.enabled (or (not .Values.autoscaling.prefill.minReplicas) (not .Values.autoscaling.decode.minReplicas)) -}}true{{- end -}}
{{- end -}}

{{/* ---- probes: gRPC, on the plaintext health port (name: health) ---- */}}

{{/* dict startupSeconds, port (a number: gRPC probes take no names), readiness: the service asked, if not readiness */}}
{{- define "twostep.probes" -}}
startupProbe:
  grpc:
    port: {{ .port }}
    service: liveness
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 6 (div (add (int64 .startupSeconds) 4) 5) }}
readinessProbe:
  grpc:
    port: {{ .port }}
    service: {{ default "readiness" .readiness }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  grpc:
    port: {{ .port }}
    service: liveness
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- end -}}
