{{/* What values.schema.json cannot say: values that contradict each other. */}}
{{- define "twostep.check" -}}
{{- $pools := splitList " " (include "twostep.pools" .) -}}
{{- $transfer := include "twostep.kvTransfer" (dict "root" . "component" (last $pools)) -}}
{{- include "twostep.checkComponents" . -}}
{{- include "twostep.checkPorts" . -}}
{{- if and (not (has "prefill" $pools)) .Values.autoscaling.enabled -}}
{{- fail "autoscaling.enabled moves the replicas of the prefill and decode Deployments, and with colocated.enabled there are none: set colocated.besidePools, or switch one of them off" -}}
{{- end -}}
{{- if .Values.redis.embedded }}{{ include "twostep.checkRedis" . }}{{ end -}}
{{- if and (eq .Values.model.volume.type "emptyDir") (not .Values.model.loader.enabled) -}}
{{- fail "model.volume.type emptyDir begins empty: set model.loader.enabled and model.loader.hub or command, or another type" -}}
{{- end -}}
{{- if and .Values.model.loader.enabled (eq (empty .Values.model.loader.command) (empty .Values.model.loader.hub)) -}}
{{- fail "model.loader.enabled needs one of model.loader.hub, ORG/NAME of the Hugging Face hub, and model.loader.command, which puts the model into MODEL_PATH" -}}
{{- end -}}
{{- if and .Values.model.loader.enabled (has .Values.model.volume.type (list "image" "hostPath")) -}}
{{- fail (printf "model.loader writes to /models, and model.volume.type %s is not written to: use pvc or emptyDir" .Values.model.volume.type) -}}
{{- end -}}
{{- if and (contains "ray" $transfer) (not .Values.ray.enabled) -}}
{{- fail (printf "workers.kvTransfer is %q and ray.enabled is false: enable Ray, or leave ray out" $transfer) -}}
{{- end -}}
{{- $ipc := or (eq $transfer "cuda_ipc") (and (contains "cuda_ipc" $transfer) (not .Values.ray.enabled)) -}}
{{- if and .Values.colocated.enabled $ipc (gt (int .Values.colocated.gpusPerWorker) 1) -}}
{{- fail "CUDA IPC reads a pool on one GPU: with colocated.gpusPerWorker above 1 enable Ray" -}}
{{- end -}}
{{- if and .Values.colocated.enabled $ipc (not .Values.colocated.gpusPerWorker) -}}
{{- fail "CUDA IPC is for GPUs: with colocated.gpusPerWorker 0 enable Ray" -}}
{{- end -}}
{{- if and .Values.colocated.enabled (eq $transfer "cuda_ipc") (gt (int .Values.colocated.replicas) 1) -}}
{{- fail "CUDA IPC joins workers of one pod: with colocated.replicas above 1 enable Ray for the pairs of two pods" -}}
{{- end -}}
{{- if and (eq .Values.ray.mode "external") .Values.ray.enabled (not .Values.ray.address) -}}
{{- fail "ray.mode is external: give ray.address, host:port of its GCS" -}}
{{- end -}}
{{- $nixl := or (eq $transfer "nixl") (and (contains "nixl" $transfer) (not .Values.ray.enabled)) -}}
{{- $prefills := and (has "prefill" $pools) (or .Values.autoscaling.enabled (gt (int .Values.prefill.replicas) 0)) -}}
{{- if and $nixl $prefills (not .Values.prefill.gpus) -}}
{{- fail "without ray.enabled KV travels by nixl, and workers without GPUs have no nixl: enable Ray, or set prefill.replicas to 0 and workers.kvTransfer to none" -}}
{{- end -}}
{{- if and (eq .Values.ray.mode "external") .Values.ray.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.rayFrom) -}}
{{- fail "ray.mode is external, and its head must reach the raylets: give networkPolicy.rayFrom, who it is" -}}
{{- end -}}
{{- if .Values.ray.enabled -}}
{{- $ports := .Values.ray.ports -}}
{{- $first := int $ports.first -}}
{{- $last := int (include "twostep.rayLastPort" .) -}}
{{- /* Of a worker's pod: those of prefill and decode, which may change their role, or one set after the other. */}}
{{- $own := list 50061 50073 -}}
{{- if .Values.colocated.enabled -}}
{{- $last := add 50093 (mul 10 (add .Values.colocated.prefill .Values.colocated.decode)) | int -}}
{{- $own = list (ternary 50061 50100 (has "prefill" $pools)) $last -}}
{{- end -}}
{{- $beyond := or (gt $last 65535) (and (le $first (index $own 1)) (ge $last (index $own 0))) -}}
{{- $head := "" -}}
{{- if ne .Values.ray.mode "external" -}}
{{- $head = printf ", ray.ports.gcs (%v) and ray.ports.client (%v)" $ports.gcs $ports.client -}}
{{- range $port := list (int $ports.gcs) (int $ports.client) -}}
{{- if and (le $first $port) (ge $last $port) }}{{ $beyond = true }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if $beyond -}}
{{- fail (printf "ray.ports.first and ray.ports.workers give every Ray node the ports %d to %d: they must end by 65535, and leave out %d to %d, which are the workers' own%s" $first $last (index $own 0) (index $own 1) $head) -}}
{{- end -}}
{{- end -}}
{{- range $name, $pool := pick .Values "prefill" "decode" "colocated" -}}
{{- if has $name $pools -}}
{{- if and (has (toString $pool.maxSurge) (list "0" "0%")) (has (toString $pool.maxUnavailable) (list "0" "0%")) -}}
{{- fail (printf "%s.maxSurge and %s.maxUnavailable are both 0, and no pod could ever be replaced: set one of them to 1" $name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.networkPolicy.egress -}}
{{- $outside := list -}}
{{- if not .Values.redis.embedded }}{{ $outside = append $outside "Redis" }}{{ end -}}
{{- if and .Values.ray.enabled (eq .Values.ray.mode "external") }}{{ $outside = append $outside "Ray's head" }}{{ end -}}
{{- /* A collector beside each process is within. */}}
{{- $beside := "^https?://(localhost|127[.0-9]+|\\[::1\\])(:|/|$)" }}
{{- if and .Values.tracing.otlpEndpoint (not (regexMatch $beside .Values.tracing.otlpEndpoint)) }}{{ $outside = append $outside "the collector of tracing.otlpEndpoint" }}{{ end -}}
{{- if and $outside .Values.networkPolicy.enabled (not .Values.networkPolicy.extraEgress) -}}
{{- fail (printf "networkPolicy.egress lets pods reach nothing outside the release, and %s is there: give networkPolicy.extraEgress" (join " and " $outside)) -}}
{{- end -}}
{{- end -}}
{{- $counts := dict -}}
{{- if has "colocated" $pools }}{{ $_ := set $counts "colocated.gpusPerWorker" .Values.colocated.gpusPerWorker }}{{ end -}}
{{- if has "prefill" $pools -}}
{{- $_ := set $counts "decode.gpus" .Values.decode.gpus -}}
{{- if or .Values.prefill.replicas .Values.autoscaling.enabled }}{{ $_ := set $counts "prefill.gpus" .Values.prefill.gpus }}{{ end -}}
{{- end -}}
{{- range $name, $gpus := $counts -}}
{{- if and (eq $.Values.workers.device "cuda") (not $gpus) -}}
{{- fail (printf "workers.device is cuda and %s is 0: such workers see no GPU; give them some, or workers.device auto" $name) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $transfer "none") .Values.autoscaling.enabled -}}
{{- fail "workers.kvTransfer none leaves prefill workers nothing to do, and the autoscaler would make some: set autoscaling.enabled to false" -}}
{{- end -}}
{{- range $pool, $name := dict "prefill" "prefill.replicas" "colocated" "colocated.prefill" -}}
{{- if and (eq $transfer "none") (has $pool $pools) (gt (int (get (index $.Values $pool) (last (splitList "." $name)))) 0) -}}
{{- fail (printf "workers.kvTransfer none leaves prefill workers nothing to do: set %s to 0" $name) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $transfer "cuda_ipc") (has "prefill" $pools) .Values.colocated.enabled -}}
{{- fail "CUDA IPC joins workers of one pod: with colocated.besidePools let workers.kvTransfer be auto, or name ray or nixl, too" -}}
{{- end -}}
{{- end -}}

{{/* Ports of a pod that its values choose: none of those that it has already. */}}
{{- define "twostep.checkPorts" -}}
{{- $admin := int .Values.auth.adminPort -}}
{{- range $flag, $port := include "twostep.routerFlags" . | fromYaml -}}
{{- if and (hasSuffix "port" $flag) (ne $flag "admin-port") (eq (int $port) $admin) -}}
{{- fail (printf "auth.adminPort is %d, and routers have that port already (--%s): give another one, such as 8001" $admin $flag) -}}
{{- end -}}
{{- end -}}
{{- $ports := .Values.ray.ports -}}
{{- if and .Values.ray.enabled (ne .Values.ray.mode "external") (eq (int $ports.gcs) (int $ports.client)) -}}
{{- fail (printf "ray.ports.gcs and ray.ports.client are both %v, on one head: give one of them another port" $ports.gcs) -}}
{{- end -}}
{{- end -}}

{{/* What each component's own values say. */}}
{{- define "twostep.checkComponents" -}}
{{- $root := . -}}
{{- $removed := .Files.Get "files/removed.json" | fromJson -}}
{{- $places := dict "commonLabels" (dict "labels" .Values.commonLabels) "components" (.Values.components | default dict)
  "router" .Values.router "autoscaling" .Values.autoscaling "ray.head" .Values.ray.head "redis" .Values.redis
  "prefill" .Values.prefill "decode" .Values.decode "colocated" .Values.colocated -}}
{{- range $place, $owner := $places -}}
{{- range $owner.env -}}
{{- /* Removed flags are refused by the schema; a variable would stop the first new pod. */}}
{{- if hasKey $removed .name -}}
{{- fail (printf "%s.env has %s, which was removed: %s" $place .name (get $removed .name)) -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "labels" "podLabels" -}}
{{- range $label, $_ := get $owner $kind | default dict -}}
{{- if regexMatch "^(helm[.]sh/chart|app[.]kubernetes[.]io/(name|instance|component|part-of|version|managed-by))$" $label -}}
{{- $place = ternary $place (printf "%s.%s" $place $kind) (eq $place "commonLabels") -}}
{{- fail (printf "%s has %s, which the chart sets itself, and finds its objects by such labels: give it another name" $place $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $pool := splitList " " (include "twostep.pools" .) -}}
{{- $own := include "twostep.settings" (dict "root" $root "component" $pool) | fromYaml -}}
{{- $gpus := int $own.gpus -}}
{{- if eq $pool "colocated" }}{{ $gpus = mul $own.gpusPerWorker (add $own.prefill $own.decode) | int }}{{ end -}}
{{- if and $own.resourceClaims (semverCompare "<1.32.0-0" $root.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "%s has resourceClaims, and Kubernetes %s has none yet (1.32 behind a feature gate, 1.34): give gpuResource, which a device plugin counts" $pool $root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- range $own.resourceClaims -}}
{{- if eq (empty .resourceClaimName) (empty .resourceClaimTemplateName) -}}
{{- fail (printf "%s: the claim %s of resourceClaims needs resourceClaimName (one that all pods share) or resourceClaimTemplateName (one for each pod), and not both" $pool .name) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $own.gpuResource "none") $gpus (not $own.resourceClaims) -}}
{{- fail (printf "%s has GPUs and gpuResource none, and nothing brings them: give resourceClaims, or the resource that counts them" $pool) -}}
{{- end -}}
{{- if and (regexMatch "/mig-" $own.gpuResource) (gt $gpus 1) -}}
{{- fail (printf "%s asks for %d of %s in one pod, and a process sees one MIG device: give each worker a pod of its own with 1 of them" $pool $gpus $own.gpuResource) -}}
{{- end -}}
{{- end -}}
{{- $service := .Values.router.service -}}
{{- range $field := list "loadBalancerClass" "loadBalancerSourceRanges" "externalTrafficPolicy" -}}
{{- $takes := ternary (list "NodePort" "LoadBalancer") (list "LoadBalancer") (eq $field "externalTrafficPolicy") -}}
{{- if and (get $service $field) (not (has $service.type $takes)) -}}
{{- fail (printf "router.service.%s is for router.service.type %s, and it is %s: change the type, or leave it out" $field (join " or " $takes) $service.type) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* That there is a model: nothing that could stand for one would be the one that is wanted. (`helm lint` overlooks a fail.) */}}
{{- define "twostep.checkModel" -}}
{{- $model := .Values.model -}}
{{- if not $model.path -}}
{{- fail "which model? Give model.path, its directory in the containers, and what holds it: model.volume.existingClaim, another model.volume.type, or model.loader, which fetches it (docs/kubernetes.md). With a small model that it fetches itself: -f helm/values-demo.yaml, as it lies in the repository" -}}
{{- else if and (ne $model.volume.type "image") (not (regexMatch "^/models(/|$)" $model.path)) -}}
{{- fail (printf "model.path is %s, and model.volume is mounted at /models: give the path below it, as in /models/Llama-3.1-8B-Instruct; or model.volume.type image, if the model is in the images" $model.path) -}}
{{- else if and (eq $model.volume.type "pvc") (not $model.volume.existingClaim) (not $model.loader.enabled) -}}
{{- $claim := include "twostep.modelClaim" . -}}
{{- fail (printf "nothing puts a model into the claim that the chart would make: give model.volume.existingClaim, a claim that holds it (also if it is %s, which an earlier release made), or model.loader.enabled and model.loader.hub or command" $claim) -}}
{{- end -}}
{{- end -}}

{{/* That Redis may write its file anew: it forks, and what changes before the child has ended is there twice; at worst all of it. */}}
{{- define "twostep.checkRedis" -}}
{{- $memory := dig "limits" "memory" "" (default dict .Values.redis.resources) -}}
{{- if $memory -}}
{{- $given := include "twostep.text" .Values.redis.maxMemory -}}
{{- $memory = include "twostep.text" $memory -}}
{{- $data := int64 (include "twostep.redisBytes" $given) -}}
{{- $limit := int64 (include "twostep.bytes" $memory) -}}
{{- $half := printf "%dmb" (div $limit 2097152) -}}
{{- if not $data -}}
{{- fail (printf "redis.maxMemory is %s, which to Redis is no bound, and redis.resources.limits.memory is %s: it would be killed for its memory; set redis.maxMemory to %s at most" $given $memory $half) -}}
{{- end -}}
{{- if gt (mul 2 $data) $limit -}}
{{- fail (printf "redis.maxMemory is %s and redis.resources.limits.memory is %s: when Redis forks to write its file anew, it may take twice its data, and be killed for it; set redis.maxMemory to %s at most, or redis.resources.limits.memory to %dMi at least" $given $memory $half (div (add (mul 2 $data) 1048575) 1048576)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
