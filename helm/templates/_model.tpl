{{/* The model: a volume at /models for router and workers, and the init container that fills it. */}}

{{- define "twostep.modelClaim" -}}
{{- default (include "twostep.component" (dict "root" . "component" "model")) .Values.model.volume.existingClaim -}}
{{- end -}}

{{- define "twostep.modelVolumes" -}}
{{- $volume := .Values.model.volume -}}
{{- if ne $volume.type "image" -}}
- name: models
{{- if eq $volume.type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ include "twostep.modelClaim" . }}
{{- else if eq $volume.type "hostPath" }}
  hostPath:
    path: {{ required "model.volume.type is hostPath: give model.volume.hostPath, a directory of the nodes" $volume.hostPath }}
    type: Directory
{{- else if eq $volume.type "emptyDir" }}
  emptyDir:
    sizeLimit: {{ $volume.sizeLimit }}
{{- else }}
{{- fail (printf "model.volume.type is %q; give pvc, hostPath, emptyDir or image" $volume.type) }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "twostep.modelMounts" -}}
{{- if ne .Values.model.volume.type "image" -}}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- end -}}

{{/* Runs the command given unless the model is there already. Takes the root context; the pod must have the volumes tmp and models. */}}
{{- define "twostep.modelLoader" -}}
{{- $loader := .Values.model.loader -}}
- name: load-model
  image: {{ default (include "twostep.image" (dict "root" . "image" "worker")) $loader.image }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [/bin/sh, -c]
  args:
    - |
      if [ -e "$MODEL_PATH/config.json" ]; then
        echo "$MODEL_PATH is there already"
        exit 0
      fi
      "$@" || exit
      if [ ! -e "$MODEL_PATH/config.json" ]; then
        echo "the loader has ended, and there is no $MODEL_PATH/config.json" >&2
        exit 1
      fi
    - load-model
    {{- range concat $loader.command $loader.args }}
    - {{ . | quote }}
    {{- end }}
  env:
    - name: MODEL_PATH
      value: {{ .Values.model.path | quote }}
    - name: HOME
      value: /tmp
    # Without a GPU of its own: the worker's image asks for all of them.
    - name: NVIDIA_VISIBLE_DEVICES
      value: void
    {{- with $loader.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $loader.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "twostep.containerSecurityContext" . | nindent 4 }}
  resources:
    {{- toYaml $loader.resources | nindent 4 }}
  volumeMounts:
    - name: models
      mountPath: /models
    - name: tmp
      mountPath: /tmp
{{- end -}}
