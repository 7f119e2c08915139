{{/*
Certificates of `tls.mode: generated`, as YAML: ca, server and client, each {crt, key}. Certificates of an earlier release
are reused from its Secrets; missing ones are generated. Evaluated once per rendering: every template must get the same.
*/}}
{{- define "stowage.generated" -}}
{{- if not (hasKey . "stowageGenerated") -}}
{{- if not (or .Values.tls.generated.allowTemplate (include "stowage.online" .)) -}}
{{- fail "tls.mode is generated, but this rendering can't read the cluster (helm template, Argo CD): each one would make new certificates. Set tls.mode to cert-manager or secret, or set tls.generated.allowTemplate" -}}
{{- end -}}
{{- $full := include "stowage.fullname" . -}}
{{- $server := include "stowage.serverName" . -}}
{{- $days := int .Values.tls.generated.validityDays -}}
{{- $made := dict -}}
{{- $ca := dict -}}
{{- $old := lookup "v1" "Secret" .Release.Namespace (printf "%s-ca" $full) -}}
{{- $kept := and $old (hasKey ($old.data | default dict) "tls.crt") (hasKey ($old.data | default dict) "tls.key") -}}
{{- if $kept -}}
{{- $ca = buildCustomCert (index $old.data "tls.crt") (index $old.data "tls.key") -}}
{{- else -}}
{{- $ca = genCA (printf "%s-ca" $full) $days -}}
{{- end -}}
{{- $_ := set $made "ca" (dict "crt" $ca.Cert "key" $ca.Key) -}}
{{- range $kind, $secret := dict "server" (include "stowage.tlsSecret" .) "client" (include "stowage.schedulerTlsSecret" .) -}}
{{- $data := (lookup "v1" "Secret" $.Release.Namespace $secret).data | default dict -}}
{{- if and $kept (hasKey $data "tls.crt") (hasKey $data "tls.key") -}}
{{- $_ := set $made $kind (dict "crt" (index $data "tls.crt" | b64dec) "key" (index $data "tls.key" | b64dec)) -}}
{{- else -}}
{{- $names := eq $kind "server" | ternary (list $server (trimSuffix ".svc" $server) (printf "%s.cluster.local" $server)) list -}}
{{- $leaf := genSignedCert (eq $kind "server" | ternary $server (include "stowage.schedulerCommonName" $) | trunc 63) nil $names $days $ca -}}
{{- $_ := set $made $kind (dict "crt" $leaf.Cert "key" $leaf.Key) -}}
{{- end -}}
{{- end -}}
{{- $_ := set . "stowageGenerated" (toYaml $made) -}}
{{- end -}}
{{- .stowageGenerated -}}
{{- end -}}

{{/* The webhook's caBundle in base64, if the chart knows it. */}}
{{- define "stowage.caBundle" -}}
{{- if .Values.webhook.caBundle -}}
{{- .Values.webhook.caBundle -}}
{{- else if eq .Values.tls.mode "generated" -}}
{{- (include "stowage.generated" . | fromYaml).ca.crt | b64enc -}}
{{- else if and (eq .Values.tls.mode "secret") (not .Values.webhook.annotations) -}}
{{- fail "tls.mode is secret: set webhook.caBundle to the base64 of the PEM of the CA that signed the certificate, or webhook.annotations to what injects it" -}}
{{- end -}}
{{- end -}}
