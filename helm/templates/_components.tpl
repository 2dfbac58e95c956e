{{/* Components: what the values say of each, and what all of their pods have. A component is a dict of root (the root context) and
     component (its name, as in the names of its objects). Further keys are what a template below asks for. */}}

{{/* What a component's own block says, over what holds for all pools of workers, over what holds for all components; as YAML. Hook Jobs and
     the pod of `helm test` go where routers may. */}}
{{- define "twostep.settings" -}}
{{- $values := .root.Values -}}
{{- $all := $values.components | default dict -}}
{{- $blocks := dict "router" $values.router "autoscaler" $values.autoscaling "ray-head" $values.ray.head "redis" $values.redis
  "prefill" $values.prefill "decode" $values.decode "colocated" $values.colocated -}}
{{- $own := deepCopy (get $blocks .component | default dict) -}}
{{- if has .component (list "prefill" "decode" "colocated") -}}
{{- $pools := pick $values.workers "gpuResource" "runtimeClassName" "resourceClaims" "kernelCache" -}}
{{- /* A pool's own claims are all that it has, [] included: claims that added up would take more devices. */}}
{{- if hasKey $own "resourceClaims" }}{{ $pools = omit $pools "resourceClaims" }}{{ end -}}
{{- $own = include "twostep.over" (list $own $pools) | fromYaml -}}
{{- else if has .component (list "make-secrets" "make-tls" "test") -}}
{{- $own = pick $values.router "nodeSelector" "tolerations" -}}
{{- $all = omit $all "topologySpreadConstraints" "env" "envFrom" -}}
{{- $all = omit $all "extraVolumes" "extraVolumeMounts" "extraContainers" "extraInitContainers" -}}
{{- else if not $own -}}
{{- $all = dict -}}
{{- end -}}
{{- include "twostep.over" (list $own (merge (dict "labels" dict "annotations" dict "podLabels" dict "podAnnotations" dict) $all)) -}}
{{- end -}}

{{/* The lists whose elements the API server tells apart by fields: by which (x-kubernetes-list-map-keys). */}}
{{- define "twostep.listKeys" -}}
env: [name]
extraVolumes: [name]
extraVolumeMounts: [mountPath]
extraContainers: [name]
extraInitContainers: [name]
topologySpreadConstraints: [topologyKey, whenUnsatisfiable]
{{- end -}}

{{/* list of two maps: the first over the second, as YAML. An empty text takes the second's. Lists are joined, the second's first; of elements
     with the same key the first map's stays. */}}
{{- define "twostep.over" -}}
{{- $own := deepCopy (first .) -}}
{{- $keys := include "twostep.listKeys" . | fromYaml -}}
{{- range $name, $below := last . -}}
{{- if kindIs "slice" $below -}}
{{- $joined := list (concat $below (get $own $name | default list)) (get $keys $name | default list) -}}
{{- $_ := set $own $name (include "twostep.lastOfEach" $joined | fromYamlArray) -}}
{{- end -}}
{{- end -}}
{{- toYaml (merge $own (deepCopy (last .))) -}}
{{- end -}}

{{/* list of elements and fields: of the elements that agree in these fields (none: that are the same) the last one, as YAML. */}}
{{- define "twostep.lastOfEach" -}}
{{- $fields := last . -}}
{{- $kept := list -}}
{{- $seen := dict -}}
{{- range $element := reverse (first .) -}}
{{- $key := ternary "" (toJson $element) (gt (len $fields) 0) -}}
{{- range $fields }}{{ $key = printf "%s %v" $key (get $element .) }}{{ end -}}
{{- if not (hasKey $seen $key) }}{{ $kept = prepend $kept $element }}{{ end -}}
{{- $_ := set $seen $key true -}}
{{- end -}}
{{- toYaml $kept -}}
{{- end -}}

{{/* dict root, component, object: its workload's text, which is returned. Fails where a name stands twice in its pods: the API
     server refuses that, or drops one of both at the next change. */}}
{{- define "twostep.withUniqueNames" -}}
{{- $workload := .object | fromYaml -}}
{{- $pod := (dig "spec" "headGroupSpec" $workload.spec $workload).template.spec -}}
{{- $place := get (dict "ray-head" "ray.head" "autoscaler" "autoscaling") .component | default .component -}}
{{- $own := include "twostep.settings" . | fromYaml -}}
{{- $given := list -}}
{{- range concat ($own.extraContainers | default list) ($own.extraInitContainers | default list) }}{{ $given = append $given .name }}{{ end -}}
{{- $containers := concat ($pod.initContainers | default list) $pod.containers -}}
{{- $volumes := $pod.volumes -}}
{{- range $workload.spec.volumeClaimTemplates }}{{ $volumes = append $volumes .metadata }}{{ end -}}
{{- $lists := list
  (dict "values" (printf "%s.extraContainers and extraInitContainers" $place) "key" "name" "elements" $containers)
  (dict "values" (printf "%s.extraVolumes" $place) "key" "name" "elements" $volumes) -}}
{{- $ports := list -}}
{{- range $container := $containers -}}
{{- range $container.ports }}{{ $ports = append $ports (dict "port" (printf "%v/%s" .containerPort (default "TCP" .protocol)) "container" $container.name) }}{{ end -}}
{{- $env := ternary "model.loader.env" (printf "%s.env" $place) (eq $container.name "load-model") -}}
{{- $mounts := printf "%s.extraVolumeMounts" $place -}}
{{- if has $container.name $given }}{{ $env = printf "%s's env" $container.name }}{{ $mounts = printf "%s's volumeMounts" $container.name }}{{ end -}}
{{- $lists = concat $lists (list
  (dict "values" $env "key" "name" "elements" $container.env)
  (dict "values" $mounts "key" "mountPath" "elements" $container.volumeMounts)) -}}
{{- end -}}
{{- $lists = append $lists (dict "values" (printf "%s.extraContainers' ports" $place) "key" "port" "elements" $ports) -}}
{{- range $list := $lists -}}
{{- $seen := dict -}}
{{- range $element := $list.elements -}}
{{- $name := get $element $list.key -}}
{{- if hasKey $seen $name -}}
{{- fail (printf "%s: %s is there twice in the pod of %s, as %s and as %s. What the chart sets itself is changed by its own value, such as a flag (docs/helm-values.md); give everything else another name, here or in components" $list.values $name $place (get $seen $name) (toJson $element)) -}}
{{- end -}}
{{- $_ := set $seen $name (toJson $element) -}}
{{- end -}}
{{- end -}}
{{- .object -}}
{{- end -}}

{{/* list of a map and names: what the map has of these, each as a field. */}}
{{- define "twostep.fields" -}}
{{- $map := first . -}}
{{- range $name := rest . -}}
{{- with get $map $name }}
{{ toYaml (dict $name .) }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* A list's elements; nothing for an empty one. */}}
{{- define "twostep.elements" -}}
{{- with . }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* dict root, component; port: of its metrics; annotations: further ones, a map. The metadata of a pod. */}}
{{- define "twostep.podMetadata" -}}
{{- $own := include "twostep.settings" . | fromYaml -}}
{{- $annotations := merge (dict) (.annotations | default dict) $own.podAnnotations (.root.Values.podAnnotations | default dict) -}}
{{- if and .root.Values.monitoring.annotations .port -}}
{{- $annotations = merge $annotations (dict
  "prometheus.io/scrape" "true" "prometheus.io/path" "/metrics" "prometheus.io/port" (toString .port)) -}}
{{- end -}}
labels:
  {{- include "twostep.podLabels" . | nindent 2 }}
{{- include "twostep.fields" (list (dict "annotations" $annotations) "annotations") }}
{{- end -}}

{{/* What every pod's spec begins with. dict root, component; account: its ServiceAccount, where that is not its own, "" for none; token: true
     where it asks the API server; spread: true where it is spread over nodes and zones without being told; init: its init containers. */}}
{{- define "twostep.podSpec" -}}
{{- $root := .root -}}
{{- $own := include "twostep.settings" . | fromYaml -}}
{{- $account := ternary .account (include "twostep.serviceAccountName" .) (hasKey . "account") -}}
{{- $given := dict "serviceAccountName" $account "imagePullSecrets" (include "twostep.lastOfEach" (list $root.Values.image.pullSecrets (list "name")) | fromYamlArray) -}}
automountServiceAccountToken: {{ .token | default false }}
# A Service of the name twostep would otherwise set TWOSTEP_PORT, which is a flag here.
enableServiceLinks: false
securityContext:
  {{- include "twostep.podSecurityContext" $root | nindent 2 }}
{{- include "twostep.fields" (list $given "serviceAccountName" "imagePullSecrets") }}
{{- include "twostep.fields" (list $own "runtimeClassName" "nodeSelector" "tolerations" "affinity" "priorityClassName") }}
{{- include "twostep.fields" (list $own "topologySpreadConstraints" "resourceClaims") }}
{{- if and .spread (not $own.topologySpreadConstraints) }}
# As far as possible.
topologySpreadConstraints:
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "twostep.selectorLabels" $ | nindent 8 }}
{{- end }}
{{- end }}
{{- $init := trim (.init | default "") }}
{{- if or $init $own.extraInitContainers }}
initContainers:
  {{- include "twostep.elements" $own.extraInitContainers | nindent 2 }}
  {{- $init | nindent 2 }}
{{- end }}
{{- end -}}
