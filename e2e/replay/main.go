// Command replay judges plans with kube-scheduler's own filter plugins.
//
// Standard input has one JSON document per cluster: its objects, and pods with the node that a plan chose. The pods are bound one after the
// other where planned, in the order of the plan and in random orders. A pod that the plugins reject waits, as in the scheduler's queue, until
// all other pods were tried. Standard output has one line per cluster: the pods that could not be bound, and why.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"math/rand"
	"os"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/latest"
	"k8s.io/kubernetes/pkg/scheduler/backend/cache"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/metrics"
)

// randomOrders is how many random orders are tried besides that of the plan.
const randomOrders = 2

// filters are the plugins that decide whether a pod may run on a node.
var filters = []string{
	"NodeUnschedulable", "NodeName", "TaintToleration", "NodeAffinity", "NodePorts", "NodeResourcesFit", "VolumeRestrictions",
	"NodeVolumeLimits", "VolumeBinding", "VolumeZone", "PodTopologySpread", "InterPodAffinity",
}

// A planned pod and its node.
type placement struct {
	Pod  *v1.Pod `json:"pod"`
	Node string  `json:"node"`
}

type cluster struct {
	Name string `json:"name"`
	Seed int64  `json:"seed"`
	// Running pods and those of DaemonSets have a node.
	Pods           []*v1.Pod                   `json:"pods"`
	Nodes          []*v1.Node                  `json:"nodes"`
	Namespaces     []*v1.Namespace             `json:"namespaces"`
	Volumes        []*v1.PersistentVolume      `json:"volumes"`
	Claims         []*v1.PersistentVolumeClaim `json:"claims"`
	StorageClasses []*storagev1.StorageClass   `json:"storageClasses"`
	CSINodes       []*storagev1.CSINode        `json:"csiNodes"`
	Planned        []placement                 `json:"planned"`
}

// A pod that could not be bound.
type failure struct {
	Order  int    `json:"order"`
	Pod    string `json:"pod"`
	Node   string `json:"node"`
	Plugin string `json:"plugin"`
	Reason string `json:"reason"`
}

type verdict struct {
	Name     string    `json:"name"`
	Planned  int       `json:"planned"`
	Failures []failure `json:"failures"`
}

// snapshot is what the plugins see of the cluster; it changes with each bound pod.
type snapshot struct{ *cache.Snapshot }

func (c *cluster) objects() []runtime.Object {
	var out []runtime.Object
	for _, one := range c.Nodes {
		out = append(out, one)
	}
	for _, one := range c.Namespaces {
		out = append(out, one)
	}
	for _, one := range c.Volumes {
		out = append(out, one)
	}
	for _, one := range c.Claims {
		out = append(out, one)
	}
	for _, one := range c.StorageClasses {
		out = append(out, one)
	}
	for _, one := range c.CSINodes {
		out = append(out, one)
	}
	return out
}

// profile is the scheduler's default configuration with the filter plugins alone.
func profile() (*config.KubeSchedulerProfile, error) {
	defaults, err := latest.Default()
	if err != nil {
		return nil, err
	}
	of := defaults.Profiles[0]
	plugins := &config.Plugins{
		QueueSort: config.PluginSet{Enabled: []config.Plugin{{Name: "PrioritySort"}}},
		Bind:      config.PluginSet{Enabled: []config.Plugin{{Name: "DefaultBinder"}}},
	}
	for _, name := range filters {
		plugins.MultiPoint.Enabled = append(plugins.MultiPoint.Enabled, config.Plugin{Name: name})
	}
	of.Plugins = plugins
	return &of, nil
}

// bind binds the pods in the given order and returns those that the plugins keep rejecting.
func (c *cluster) bind(ctx context.Context, fw framework.Framework, view *snapshot, order []int) []failure {
	pods := append([]*v1.Pod{}, c.Pods...)
	view.Snapshot = cache.NewSnapshot(pods, c.Nodes)
	queue := order
	for {
		var rejected []int
		var failures []failure
		for _, at := range queue {
			planned := c.Planned[at]
			if plugin, reason := filter(ctx, fw, view, planned); reason != "" {
				rejected = append(rejected, at)
				failures = append(failures, failure{Pod: planned.Pod.Namespace + "/" + planned.Pod.Name, Node: planned.Node, Plugin: plugin, Reason: reason})
				continue
			}
			bound := planned.Pod.DeepCopy()
			bound.Spec.NodeName = planned.Node
			pods = append(pods, bound)
			view.Snapshot = cache.NewSnapshot(pods, c.Nodes)
		}
		if len(rejected) == 0 || len(rejected) == len(queue) {
			return failures
		}
		queue = rejected
	}
}

// filter returns the plugin that rejects a pod on its planned node, and why; no reason if none does.
func filter(ctx context.Context, fw framework.Framework, view *snapshot, planned placement) (string, string) {
	state := framework.NewCycleState()
	nodes, status, _ := fw.RunPreFilterPlugins(ctx, state, planned.Pod)
	if !status.IsSuccess() {
		return status.Plugin(), status.Message()
	}
	if nodes != nil && !nodes.AllNodes() && !nodes.NodeNames.Has(planned.Node) {
		return "PreFilter", fmt.Sprintf("restricted to %v", nodes.NodeNames.UnsortedList())
	}
	node, err := view.Get(planned.Node)
	if err != nil {
		return "Snapshot", err.Error()
	}
	status = fw.RunFilterPlugins(ctx, state, planned.Pod, node)
	if !status.IsSuccess() {
		return status.Plugin(), status.Message()
	}
	return "", ""
}

func judge(c *cluster) (*verdict, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	client := fake.NewClientset(c.objects()...)
	factory := informers.NewSharedInformerFactory(client, 0)
	of, err := profile()
	if err != nil {
		return nil, err
	}
	view := &snapshot{cache.NewSnapshot(nil, nil)}
	fw, err := frameworkruntime.NewFramework(ctx, plugins.NewInTreeRegistry(), of,
		frameworkruntime.WithClientSet(client),
		frameworkruntime.WithInformerFactory(factory),
		frameworkruntime.WithSnapshotSharedLister(view),
	)
	if err != nil {
		return nil, err
	}
	factory.Start(ctx.Done())
	for kind, synced := range factory.WaitForCacheSync(ctx.Done()) {
		if !synced {
			return nil, fmt.Errorf("the informer of %v did not sync", kind)
		}
	}
	out := &verdict{Name: c.Name, Planned: len(c.Planned), Failures: []failure{}}
	draw := rand.New(rand.NewSource(c.Seed))
	order := make([]int, len(c.Planned))
	for at := range order {
		order[at] = at
	}
	for number := 0; number <= randomOrders; number++ {
		for _, failed := range c.bind(ctx, fw, view, append([]int{}, order...)) {
			failed.Order = number
			out.Failures = append(out.Failures, failed)
		}
		draw.Shuffle(len(order), func(a, b int) { order[a], order[b] = order[b], order[a] })
	}
	return out, nil
}

func main() {
	metrics.Register()
	in := bufio.NewReader(os.Stdin)
	decoder, encoder := json.NewDecoder(in), json.NewEncoder(os.Stdout)
	for decoder.More() {
		var c cluster
		if err := decoder.Decode(&c); err != nil {
			log.Fatalf("reading a cluster: %v", err)
		}
		found, err := judge(&c)
		if err != nil {
			log.Fatalf("cluster %s: %v", c.Name, err)
		}
		if err := encoder.Encode(found); err != nil {
			log.Fatalf("writing the verdict of %s: %v", c.Name, err)
		}
	}
}
