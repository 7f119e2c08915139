{{/*
Head of a ValidatingAdmissionPolicy that restricts the ServiceAccount, to its variables. Arguments: root, name, group, resources,
operations. Expressions read objects as maps (`dyn`), so that a field that a later Kubernetes adds is restricted, too.
*/}}
{{- define "stowage.policy" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {{ include "stowage.fullname" .root }}-{{ .name }}
  {{- include "stowage.meta" (dict "root" .root) | nindent 2 }}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
      - apiGroups:
          - {{ .group | quote }}
        apiVersions:
          - v1
        operations:
          {{- toYaml .operations | nindent 10 }}
        resources:
          {{- toYaml .resources | nindent 10 }}
  matchConditions:
    - name: stowage
      expression: request.userInfo.username == 'system:serviceaccount:{{ .root.Release.Namespace }}:{{ include "stowage.serviceAccountName" .root }}'
{{- end -}}

{{/* The binding of a policy. Arguments: root, name. */}}
{{- define "stowage.policyBinding" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ include "stowage.fullname" .root }}-{{ .name }}
  {{- include "stowage.meta" (dict "root" .root) | nindent 2 }}
spec:
  policyName: {{ include "stowage.fullname" .root }}-{{ .name }}
  validationActions:
    - Deny
{{- end -}}

{{/* Variables of what an update changes in the metadata: keys of labels and annotations, finalizers, whether the owners stay. */}}
{{- define "stowage.policyMetadata" -}}
- name: labels
  expression: >-
    object != null && has(object.metadata.labels) ? object.metadata.labels : {}
- name: oldLabels
  expression: >-
    oldObject != null && has(oldObject.metadata.labels) ? oldObject.metadata.labels : {}
- name: changedLabels
  expression: >-
    variables.labels.map(k, k).filter(k, !(k in variables.oldLabels) || variables.oldLabels[k] != variables.labels[k]) + variables.oldLabels.map(k, k).filter(k, !(k in variables.labels))
- name: annotations
  expression: >-
    object != null && has(object.metadata.annotations) ? object.metadata.annotations : {}
- name: oldAnnotations
  expression: >-
    oldObject != null && has(oldObject.metadata.annotations) ? oldObject.metadata.annotations : {}
- name: changedAnnotations
  expression: >-
    variables.annotations.map(k, k).filter(k, !(k in variables.oldAnnotations) || variables.oldAnnotations[k] != variables.annotations[k]) + variables.oldAnnotations.map(k, k).filter(k, !(k in variables.annotations))
- name: finalizers
  expression: >-
    object != null && has(object.metadata.finalizers) ? object.metadata.finalizers : []
- name: oldFinalizers
  expression: >-
    oldObject != null && has(oldObject.metadata.finalizers) ? oldObject.metadata.finalizers : []
- name: changedFinalizers
  expression: >-
    variables.finalizers.filter(f, !(f in variables.oldFinalizers)) + variables.oldFinalizers.filter(f, !(f in variables.finalizers))
- name: owners
  expression: >-
    dyn(object != null && has(object.metadata.ownerReferences) ? object.metadata.ownerReferences : [])
- name: oldOwners
  expression: >-
    dyn(oldObject != null && has(oldObject.metadata.ownerReferences) ? oldObject.metadata.ownerReferences : [])
{{- end -}}

{{/* What to do about a denied request: the end of every message. */}}
{{- define "stowage.policyAdvice" -}}
if Stowage and its chart have different versions, upgrade both; otherwise the ServiceAccount is misused
{{- end -}}
