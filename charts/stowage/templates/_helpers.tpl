{{/* Names. */}}
{{- define "stowage.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "stowage.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 45 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 45 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "stowage.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "stowage.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "stowage.schedulerFullname" -}}
{{- include "stowage.fullname" . }}-scheduler
{{- end -}}

{{/* The common name of the scheduler's client certificate. */}}
{{- define "stowage.schedulerCommonName" -}}
{{- include "stowage.schedulerFullname" . | trunc 63 -}}
{{- end -}}

{{/* The DNS name of the serving certificate. */}}
{{- define "stowage.serverName" -}}
{{- include "stowage.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "stowage.leaseNamespace" -}}
{{- .Values.settings.leaderElection.namespace | default .Release.Namespace -}}
{{- end -}}

{{/* Secrets. */}}
{{- define "stowage.tlsSecret" -}}
{{- $own := printf "%s-tls" (include "stowage.fullname" .) -}}
{{- eq .Values.tls.mode "secret" | ternary (.Values.tls.secret.name | default $own) $own -}}
{{- end -}}

{{- define "stowage.schedulerTlsSecret" -}}
{{- $own := printf "%s-scheduler-tls" (include "stowage.fullname" .) -}}
{{- eq .Values.tls.mode "secret" | ternary (.Values.tls.secret.schedulerName | default $own) $own -}}
{{- end -}}

{{/* Labels that select the pods of a component. Arguments: root, component. */}}
{{- define "stowage.selectorLabels" -}}
app.kubernetes.io/name: {{ include "stowage.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels and annotations of an object. Arguments: root; optionally component, labels, annotations. */}}
{{- define "stowage.meta" -}}
{{- $labels := dict
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63)
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $selector := include "stowage.selectorLabels" (dict "root" .root "component" (.component | default "controller")) | fromYaml -}}
labels:
  {{- merge $selector $labels (deepCopy (.labels | default dict)) (deepCopy .root.Values.additionalLabels) | toYaml | nindent 2 }}
{{- with merge (deepCopy (.annotations | default dict)) (deepCopy .root.Values.additionalAnnotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Reference of an image. Arguments: image, tag (the default). */}}
{{- define "stowage.image" -}}
{{- .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .tag }}{{ end -}}
{{- end -}}

{{/* Reference of Stowage's image. Nobody publishes one, and a default name would be that of whoever registers it first. */}}
{{- define "stowage.controllerImage" -}}
{{- $_ := required "controller.image.repository is empty: no image of Stowage is published; build one with the Dockerfile, push it to your registry, and set its repository" .Values.controller.image.repository -}}
{{- include "stowage.image" (dict "image" .Values.controller.image "tag" .Chart.AppVersion) -}}
{{- end -}}

{{/* Security context of a container under the restricted pod security standard. */}}
{{- define "stowage.restricted" -}}
allowPrivilegeEscalation: false
capabilities:
  drop:
    - ALL
privileged: false
readOnlyRootFilesystem: true
runAsGroup: 65532
runAsNonRoot: true
runAsUser: 65532
{{- end -}}

{{/* "true" if the scheduler's client certificate is created, otherwise empty. */}}
{{- define "stowage.clientCertificate" -}}
{{- if or .Values.scheduler.enabled .Values.scheduler.clientCertificate }}true{{ end -}}
{{- end -}}

{{/* Affinity; pod terms without a selector select the pods of the Deployment. */}}
{{- define "stowage.affinity" -}}
{{- $affinity := deepCopy .Values.affinity -}}
{{- $own := dict "matchLabels" (include "stowage.selectorLabels" (dict "root" . "component" "controller") | fromYaml) -}}
{{- range $kind := list "podAffinity" "podAntiAffinity" -}}
{{- $terms := get $affinity $kind | default dict -}}
{{- range $term := get $terms "requiredDuringSchedulingIgnoredDuringExecution" | default list -}}
{{- if not (hasKey $term "labelSelector") }}{{ $_ := set $term "labelSelector" $own }}{{ end -}}
{{- end -}}
{{- range $weighted := get $terms "preferredDuringSchedulingIgnoredDuringExecution" | default list -}}
{{- if not (hasKey $weighted.podAffinityTerm "labelSelector") }}{{ $_ := set $weighted.podAffinityTerm "labelSelector" $own }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{/* Topology spread; constraints without a selector select the pods of the Deployment. */}}
{{- define "stowage.topologySpread" -}}
{{- $own := dict "matchLabels" (include "stowage.selectorLabels" (dict "root" . "component" "controller") | fromYaml) -}}
{{- $constraints := list -}}
{{- range .Values.topologySpreadConstraints -}}
{{- $constraints = append $constraints (merge (deepCopy .) (hasKey . "labelSelector" | ternary dict (dict "labelSelector" $own))) -}}
{{- end -}}
{{- toYaml $constraints -}}
{{- end -}}

{{/* The ServiceAccount, as subject of a binding. */}}
{{- define "stowage.subject" -}}
- kind: ServiceAccount
  name: {{ include "stowage.serviceAccountName" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}

{{/* The service account as a subject of a FlowSchema. */}}
{{- define "stowage.flowSubject" -}}
- kind: ServiceAccount
  serviceAccount:
    name: {{ include "stowage.serviceAccountName" . }}
    namespace: {{ .Release.Namespace }}
{{- end -}}

{{/* "true" if this rendering has access to a cluster: `helm template` and Argo CD have none. */}}
{{- define "stowage.online" -}}
{{- if lookup "v1" "Namespace" "" "kube-system" }}true{{ end -}}
{{- end -}}

{{/* Fails where the kind of another project is not installed. Arguments: root, version, message. */}}
{{- define "stowage.requireKind" -}}
{{- if and (include "stowage.online" .root) (not (.root.Capabilities.APIVersions.Has .version)) -}}
{{- fail .message -}}
{{- end -}}
{{- end -}}

{{/* Variables of settings that differ from their defaults, unless `controller.env` sets them. Those of EC2 are for it only. */}}
{{- define "stowage.variables" -}}
{{- $named := list -}}
{{- range .Values.controller.env }}{{ $named = append $named .name }}{{ end -}}
{{- $settings := .Values.settings -}}
{{- $variables := list
  (list "DISABLE_CLUSTER_STATE_OBSERVABILITY" $settings.disableClusterStateObservability "false")
  (list "STOWAGE_METRIC_NAMES" .Values.controller.metrics.names "both")
  (list "STOWAGE_REPORTING_COMPONENT" $settings.reportingComponent "stowage") -}}
{{- if eq $settings.cloud "ec2" }}{{ $variables = concat $variables (list
  (list "CLUSTER_ENDPOINT" $settings.clusterEndpoint "")
  (list "CLUSTER_CA_BUNDLE" $settings.clusterCABundle "")
  (list "INTERRUPTION_QUEUE" $settings.interruptionQueue "")
  (list "ISOLATED_VPC" $settings.isolatedVPC "false")
  (list "EKS_CONTROL_PLANE" $settings.eksControlPlane "false")
  (list "VM_MEMORY_OVERHEAD_PERCENT" $settings.vmMemoryOverheadPercent "0.075")
  (list "RESERVED_ENIS" $settings.reservedENIs "0")
  (list "DISABLE_DRY_RUN" $settings.disableDryRun "false")
  (list "ENABLE_ZONAL_SHIFT" $settings.enableZonalShift "false")
  (list "AMI_REFRESH_INTERVAL" $settings.amiRefreshInterval "1m")
  (list "STOWAGE_OFFERING_METRICS" .Values.controller.metrics.offerings "true")
  (list "SUBNET_REFRESH_INTERVAL" $settings.subnetRefreshInterval "1m")) }}{{ end -}}
{{- range $variables -}}
{{- if and (ne (toString (index . 1)) (index . 2)) (not (has (index . 0) $named)) }}
- name: {{ index . 0 }}
  value: {{ index . 1 | toString | quote }}
{{- end -}}
{{- end -}}
{{- end -}}
