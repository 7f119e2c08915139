// Package suites pins Karpenter's end-to-end suites with all that they import, and Karpenter with its kwok provider, which runs them as a peer.
//
// The suites are packages that have only tests, which no import names: their imports are named instead.
package suites

import (
	_ "github.com/onsi/ginkgo/v2"
	_ "github.com/onsi/gomega"
	_ "sigs.k8s.io/karpenter/kwok/cloudprovider"
	_ "sigs.k8s.io/karpenter/test/pkg/debug"
	_ "sigs.k8s.io/karpenter/test/pkg/environment/common"
)
