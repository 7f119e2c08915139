{{/* The KubeSchedulerConfiguration. The pod has no kubeconfig: it authenticates by its ServiceAccount. */}}
{{- define "stowage.schedulerConfiguration" -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection:
  qps: {{ .Values.scheduler.qps }}
  burst: {{ .Values.scheduler.burst }}
leaderElection:
  leaderElect: true
  resourceLock: leases
  resourceName: {{ include "stowage.schedulerFullname" . }}
  resourceNamespace: {{ .Release.Namespace }}
# Pods that must be bound in turn, those of a hard topology spread, are retried soon (kube-scheduler's own default is 10).
podMaxBackoffSeconds: 2
profiles:
  - schedulerName: {{ .Values.scheduler.name }}
    percentageOfNodesToScore: {{ .Values.scheduler.percentageOfNodesToScore }}
    pluginConfig:
      - name: NodeResourcesFit
        args:
          scoringStrategy:
            type: {{ .Values.scheduler.scoringStrategy }}
            resources:
              - name: cpu
                weight: 1
              - name: memory
                weight: 1
extenders:
  - urlPrefix: {{ .Values.scheduler.extender.url | default (printf "https://%s/v1" (include "stowage.serverName" .)) }}
    filterVerb: filter
    prioritizeVerb: prioritize
    preemptVerb: preempt
    weight: {{ .Values.scheduler.extender.weight }}
    enableHTTPS: true
    tlsConfig:
      serverName: {{ include "stowage.serverName" . }}
      certFile: /etc/stowage/scheduler-tls/tls.crt
      keyFile: /etc/stowage/scheduler-tls/tls.key
      caFile: /etc/stowage/scheduler-tls/ca.crt
    httpTimeout: {{ .Values.scheduler.extender.httpTimeout }}
    # Send node names only: Stowage watches the nodes itself.
    nodeCacheCapable: true
    # Scheduling continues without Stowage.
    ignorable: true
{{- end -}}

{{- define "stowage.schedulerSubject" -}}
- kind: ServiceAccount
  name: {{ include "stowage.schedulerFullname" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}
