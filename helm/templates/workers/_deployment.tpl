{{/* One pool of workers, a worker in each pod. dict root, role (prefill or decode), port (gRPC; health and metrics follow it) */}}
{{- define "twostep.workerDeployment" -}}
{{- $root := .root -}}
{{- $component := dict "root" $root "component" .role -}}
{{- $values := include "twostep.settings" $component | fromYaml -}}
{{- $ray := eq (include "twostep.rayJoined" $root) "true" -}}
{{- $ring := int64 (include "twostep.bytes" $root.Values.workers.sharedMemory) -}}
{{- $store := ternary (int64 (include "twostep.bytes" $root.Values.ray.objectStore)) 0 $ray -}}
{{- $own := dict "grpc-port" .port "health-port" (add .port 1) "metrics-port" (add .port 2) "pod-owner" .role -}}
{{- if gt (int $values.gpus) 1 }}{{ $_ := set $own "tensor-parallel-size" $values.gpus }}{{ end -}}
{{- $flags := merge (deepCopy $values.flags) $own (include "twostep.workerFlags" $component | fromYaml) -}}
{{- $replicas := include "twostep.givenReplicas" $values -}}
{{- if $root.Values.autoscaling.enabled -}}
{{- $scaler := dict "apiVersion" "keda.sh/v1alpha1" "kind" "ScaledObject" -}}
{{- $replicas = include "twostep.presentReplicas" (merge (dict "scaler" $scaler "least" (include "twostep.leastReplicas" .) "given" $replicas) $component) -}}
{{- end -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- $mark := include "twostep.replicasMark" (list $root.Values.autoscaling.enabled $replicas) | fromYaml }}
  {{- include "twostep.metadata" (merge (dict "annotations" $mark) $component) | nindent 2 }}
spec:
  {{- with $replicas }}
  replicas: {{ . }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "twostep.selectorLabels" $component | nindent 6 }}
  # A model may take its time to load, and a drain too.
  progressDeadlineSeconds: {{ include "twostep.readySeconds" $root }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      maxSurge: {{ $values.maxSurge }}
      maxUnavailable: {{ $values.maxUnavailable }}
  template:
    metadata:
      {{- include "twostep.podMetadata" (merge (dict "port" (add .port 2)) $component) | nindent 6 }}
    spec:
      {{- include "twostep.podSpec" (merge (dict "spread" true "init" (include "twostep.workerInit" $component)) $component) | nindent 6 }}
      {{- if $ray }}
      # Ray's drivers, the workers' KV agents among them, find the raylet by looking through /proc.
      shareProcessNamespace: true
      {{- end }}
      # The drain, what a worker needs to end after it, and Ray's end after that.
      terminationGracePeriodSeconds: {{ add $root.Values.workers.drainSeconds (ternary 45 20 $ray) }}
      containers:
        - name: worker
          image: {{ include "twostep.image" (dict "root" $root "image" "worker") }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [python, -P, -m, {{ .role }}_worker]
          env:
            {{- include "twostep.commonEnv" $root | nindent 12 }}
            {{- include "twostep.tracingEnv" $root | nindent 12 }}
            {{- include "twostep.workerEnv" $root | nindent 12 }}
            {{- include "twostep.redisEnv" $root | nindent 12 }}
            {{- include "twostep.trustEnv" $root | nindent 12 }}
            {{- include "twostep.podEnv" $root | nindent 12 }}
            - name: TWOSTEP_WORKER_ID
              value: $(TWOSTEP_POD_NAME)
            - name: TWOSTEP_ADVERTISE_ADDRESS
              value: $(POD_IP):{{ .port }}
            {{- if $ray }}
            {{- include "twostep.rayAuthEnv" $root | nindent 12 }}
            {{- end }}
            {{- include "twostep.noGpuEnv" (dict "own" $values "gpus" $values.gpus) | nindent 12 }}
            {{- if and (not $values.gpus) (not (hasKey $flags "cpu-threads")) }}
            # Threads by what this container may use, not by what its node has.
            - name: TWOSTEP_CPU_THREADS
              valueFrom:
                resourceFieldRef:
                  containerName: worker
                  resource: limits.cpu
            {{- end }}
            {{- include "twostep.flagEnv" (dict "flags" $flags) | nindent 12 }}
            {{- include "twostep.elements" $values.env | nindent 12 }}
          {{- include "twostep.fields" (list $values "envFrom") | nindent 10 }}
          ports:
            - name: grpc
              containerPort: {{ .port }}
            - name: health
              containerPort: {{ add .port 1 }}
            - name: metrics
              containerPort: {{ add .port 2 }}
          {{- include "twostep.probes" (dict "startupSeconds" $root.Values.workers.startupSeconds "port" (add .port 1)) | nindent 10 }}
          securityContext:
            {{- include "twostep.workerSecurityContext" $root | nindent 12 }}
          resources:
            {{- include "twostep.workerResources" (dict "root" $root "own" $values "gpus" $values.gpus "add" $ring) | nindent 12 }}
          volumeMounts:
            {{- include "twostep.workerMounts" $root | nindent 12 }}
            {{- if $ray }}
            {{- include "twostep.rayAuthMounts" $root | nindent 12 }}
            {{- end }}
            {{- include "twostep.kernelCacheMount" $component | nindent 12 }}
            {{- include "twostep.elements" $values.extraVolumeMounts | nindent 12 }}
        {{- if $ray }}
        {{- include "twostep.raylet" (dict "root" $root "health" (add .port 1)) | nindent 8 }}
        {{- end }}
        {{- include "twostep.elements" $values.extraContainers | nindent 8 }}
      volumes:
        {{- include "twostep.workerVolumes" (merge (dict "shm" (add $ring $store)) $component) | nindent 8 }}
        {{- if $ray }}
        {{- include "twostep.rayAuthVolumes" $root | nindent 8 }}
        {{- end }}
        {{- include "twostep.elements" $values.extraVolumes | nindent 8 }}
{{- end -}}

{{/* All workers of a pool by address, whether they are ready or not. dict root, role, port */}}
{{- define "twostep.workerService" -}}
{{- $component := dict "root" .root "component" .role -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "twostep.metadata" $component | nindent 2 }}
spec:
  type: ClusterIP
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "twostep.selectorLabels" $component | nindent 4 }}
  ports:
    - name: grpc
      port: {{ .port }}
      targetPort: grpc
    - name: metrics
      port: {{ add .port 2 }}
      targetPort: metrics
{{- end -}}
