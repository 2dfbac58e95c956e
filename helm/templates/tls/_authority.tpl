{{/* An authority of the release's own, made by cert-manager: a self-signed issuer signs it, and the Issuer NAME-authority signs with it.
     dict root, name, commonName */}}
{{- define "twostep.certAuthority" -}}
{{- $labels := include "twostep.labels" (dict "root" .root "component" "tls") -}}
apiVersion: cert-manager.io/v1
kind: Issuer
metadata:
  name: {{ .name }}-self-signed
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- $labels | nindent 4 }}
spec:
  selfSigned: {}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {{ .name }}-authority
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- $labels | nindent 4 }}
spec:
  isCA: true
  commonName: {{ .commonName | trunc 64 }}
  secretName: {{ .name }}-authority
  # Ten years: processes trust this authority alone, and one that changed would divide them while they restart.
  duration: 87600h
  privateKey: {algorithm: ECDSA, size: 256, rotationPolicy: Never}
  issuerRef: {name: {{ .name }}-self-signed, kind: Issuer, group: cert-manager.io}
---
apiVersion: cert-manager.io/v1
kind: Issuer
metadata:
  name: {{ .name }}-authority
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- $labels | nindent 4 }}
spec:
  ca:
    secretName: {{ .name }}-authority
{{- end -}}
