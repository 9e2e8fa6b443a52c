{{- define "d2lpm.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "d2lpm.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: router
{{- end -}}

{{- define "d2lpm.labels" -}}
{{ include "d2lpm.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The label of the Services of this release's workers, by which the router finds them. */}}
{{- define "d2lpm.workerLabel" -}}
d2lpm-router: {{ include "d2lpm.fullname" . }}
{{- end -}}

{{/* "yes" if replicas ask the API for a Lease. */}}
{{- define "d2lpm.hasLease" -}}
{{- if and .Values.cluster.enabled (eq .Values.cluster.lease "kubernetes") }}yes{{ end -}}
{{- end -}}

{{/* The router's settings: what the chart needs, and what the operator sets on top. */}}
{{- define "d2lpm.config" -}}
{{- $config := dict "host" "0.0.0.0" "port" 8000 "admin_port" 9000 "log_format" "json" "access_log" .Values.accessLog "drain_timeout" 25 -}}
{{- if include "d2lpm.hasState" . }}{{ $_ := set $config "state" "/var/lib/d2lpm" }}{{ end -}}
{{- with .Values.cluster }}
{{- if .enabled }}
{{- if not .existingSecret }}{{ fail "cluster.existingSecret is missing: the Secret by which replicas know each other" }}{{ end }}
{{- if eq .lease "kubernetes" }}{{ $_ := set $config "cluster" "kubernetes" }}
{{- else if ne .lease "store" }}{{ fail "cluster.lease is store or kubernetes" }}{{ end }}
{{- $setting := ternary "cluster_store" "cluster" (eq .lease "kubernetes") }}
{{- with .url }}{{ $_ := set $config $setting . }}{{ end }}
{{- $_ := set $config "cluster_secret_file" "/etc/d2lpm/cluster/cluster-secret" }}
{{- if .tls.existingSecret }}
{{- $_ := set $config "cluster_tls_cert" "/etc/d2lpm/cluster-tls/tls.crt" }}
{{- $_ := set $config "cluster_tls_key" "/etc/d2lpm/cluster-tls/tls.key" }}
{{- $_ := set $config "cluster_tls_ca" "/etc/d2lpm/cluster-tls/ca.crt" }}
{{- end }}
{{- $_ := set $config "drain_delay" 5 }}
{{- end }}
{{- end }}
{{- if or .Values.clients.value .Values.clients.existingSecret }}{{ $_ := set $config "clients" "/etc/d2lpm/clients/clients.yaml" }}{{ end -}}
{{- if .Values.tls.existingSecret }}
{{- $_ := set $config "tls_cert" "/etc/d2lpm/tls/tls.crt" }}
{{- $_ := set $config "tls_key" "/etc/d2lpm/tls/tls.key" }}
{{- end -}}
{{- if .Values.discovery.enabled }}
{{- $own := printf "d2lpm-router=%s" (include "d2lpm.fullname" .) }}
{{- $_ := set $config "worker_kubernetes" (default (list $own) .Values.discovery.selectors) }}
{{- with .Values.discovery.namespace }}{{ $_ := set $config "kubernetes_namespace" . }}{{ end }}
{{- end -}}
{{- toYaml (mergeOverwrite $config (deepCopy .Values.config)) -}}
{{- end -}}

{{/* Not empty if the router keeps its state in a volume. */}}
{{- define "d2lpm.hasState" -}}
{{- if and .Values.state.enabled (not .Values.cluster.enabled) }}yes{{ end -}}
{{- end -}}

{{- define "d2lpm.secretName" -}}
{{- /* The Secret with a key: the operator's own, or the chart's. */ -}}
{{- .given.existingSecret | default (include "d2lpm.fullname" .root) -}}
{{- end -}}

{{- define "d2lpm.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
