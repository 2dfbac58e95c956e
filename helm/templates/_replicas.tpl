{{/* Replicas of Deployments that are scaled from elsewhere. In general the chart says no number there, so that neither an upgrade nor a rollback
     undoes what was decided. But one that it has said before cannot just be left out: Helm would take it away, Kubernetes would put 1 in its
     place, and all other pods would end. So where one was said, the present number is said instead, and an annotation remembers that; until an
     upgrade meets one pod, when leaving it out changes nothing. It is looked up in the cluster. Where nothing can be (`helm template`, Argo
     CD), autoscaling.holdReplicas says the given number until its owner is another one (docs/kubernetes.md).

     dict root, component, scaler: apiVersion and kind of what scales it (of the Deployment's name), least: pods that it will have at least,
     given: the values' number. The number, or nothing. */}}
{{- define "twostep.presentReplicas" -}}
{{- if .root.Values.autoscaling.holdReplicas }}{{ .given }}{{ else }}{{ include "twostep.lookedUpReplicas" . }}{{ end -}}
{{- end -}}

{{- define "twostep.lookedUpReplicas" -}}
{{- $namespace := .root.Release.Namespace -}}
{{- $name := include "twostep.component" . -}}
{{- $deployment := lookup "apps/v1" "Deployment" $namespace $name -}}
{{- if $deployment -}}
{{- $present := int (dig "spec" "replicas" 1 $deployment) -}}
{{- $said := dig "metadata" "annotations" (include "twostep.replicasSaid" .) "" $deployment -}}
{{- $scaled := false -}}
{{- if .root.Capabilities.APIVersions.Has .scaler.apiVersion -}}
{{- $scaled = lookup .scaler.apiVersion .scaler.kind $namespace $name -}}
{{- end -}}
{{- /* Scaled already, and no annotation: no number was said. */}}
{{- if and (or $said (not $scaled)) (ne $present 1) -}}
{{- max $present (int .least) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The number of pods as given; nothing for null, with which an HPA of one's own decides. Takes the values of the pool. */}}
{{- define "twostep.givenReplicas" -}}
{{- if not (kindIs "invalid" .replicas) }}{{ int .replicas }}{{ end -}}
{{- end -}}

{{/* The annotation's name. */}}
{{- define "twostep.replicasSaid" -}}
twostep/replicas
{{- end -}}

{{/* list of whether it is scaled from elsewhere, and the number that is said all the same or nothing: the annotation, as YAML. */}}
{{- define "twostep.replicasMark" -}}
{{- if and (first .) (last .) }}{{ include "twostep.replicasSaid" . }}: said{{ end -}}
{{- end -}}

{{/* The number of pods that a pool has at least while KEDA scales it. dict root, role */}}
{{- define "twostep.leastReplicas" -}}
{{- $scaling := .root.Values.autoscaling -}}
{{- $least := int (index $scaling .role).minReplicas -}}
{{- if or $least (not $scaling.scaleToZeroAfterSeconds) }}{{ max 1 $least }}{{ else }}0{{ end -}}
{{- end -}}
