// Command bench-route measures one routing decision and prints a line "name value unit" for each figure:
//
//	decide/<policy>/<replicas> 0.9 us        mean time of a decision
//	candidate/<policy>/<replicas> 28 ns      the same for each candidate
//	allocs/<policy>/<replicas> 0 allocs/op   memory allocations of a decision
//	lookup/memory/<blocks>x<replicas> 12 us  the embedded index's answer for a prompt, which comes before the decision
//
// It is run by make bench-route and takes about half a minute on one core.
package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"prefixgate/internal/block"
	"prefixgate/internal/index"
	"prefixgate/internal/replica"
	"prefixgate/internal/route"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench-route:", err)
		os.Exit(1)
	}
}

func run() error {
	for _, replicas := range []int{8, 128, 1000} {
		for _, name := range route.Names() {
			if err := decide(name, replicas); err != nil {
				return err
			}
		}
	}
	for _, replicas := range []int{8, 128, 1000} {
		for _, blocks := range []int{256, 6250} {
			lookup(blocks, replicas)
		}
	}
	return nil
}

// fleet is a busy fleet, no two replicas in the same state.
func fleet(rng *rand.Rand, n int) []route.Candidate {
	cs := make([]route.Candidate, n)
	for i := range cs {
		cs[i] = route.Candidate{
			ID:            replica.ID{Addr: fmt.Sprintf("http://10.1.%d.%d:8000", i/250, i%250), Start: 1},
			MatchedTokens: rng.IntN(4) * rng.IntN(1000),
			QueuedTokens:  rng.Int64N(20_000),
			QueuedPrompts: 1 + rng.IntN(3),
			QueueAge:      1e8,
			InFlight:      10 + rng.IntN(10),
			Running:       8 + rng.IntN(8),
			Waiting:       rng.IntN(3),
			KVUsage:       rng.Float64(),
			PrefillRate:   7000 + 2000*rng.Float64(),
			MetricsFresh:  true,
			Healthy:       true,
		}
	}
	return cs
}

// requests are several, so that no branch is learned by heart.
func requests(rng *rand.Rand) []route.Request {
	reqs := make([]route.Request, 64)
	for i := range reqs {
		reqs[i] = route.Request{
			PromptTokens: 4000, Prefix: rng.Uint64(), TextPrefix: rng.Uint64(), SimHash: rng.Uint64(), Session: rng.Uint64(),
		}
	}
	return reqs
}

func decide(name string, replicas int) error {
	p, err := route.New(route.Options{Policy: name})
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(1, uint64(replicas)))
	cs, reqs := fleet(rng, replicas), requests(rng)
	r := testing.Benchmark(func(b *testing.B) {
		b.Helper()
		b.ReportAllocs()
		for i := range b.N {
			if _, ok := p.Pick(&reqs[i%len(reqs)], cs); !ok {
				b.Fatal("no pick")
			}
		}
	})
	ns := float64(r.T.Nanoseconds()) / float64(r.N)
	fmt.Printf("decide/%s/%d %.2f us\n", name, replicas, ns/1000)
	fmt.Printf("candidate/%s/%d %.1f ns\n", name, replicas, ns/float64(replicas))
	fmt.Printf("allocs/%s/%d %d allocs/op\n", name, replicas, r.AllocsPerOp())
	return nil
}

// lookup measures the embedded index for a prompt of which each replica holds some part.
func lookup(blocks, replicas int) {
	m := index.NewMemory(index.Options{MaxMemoryBytes: 2 << 30}, prometheus.NewRegistry())
	rng := rand.New(rand.NewPCG(2, uint64(replicas)))
	chain := make([]block.Hash, blocks)
	for i := range chain {
		chain[i] = block.Hash(rng.Uint64())
	}
	holders := make([]index.Holder, replicas)
	for i := range holders {
		holders[i].ID = replica.ID{Addr: fmt.Sprintf("http://10.1.%d.%d:8000", i/250, i%250), Start: 1}
		m.Record(holders[i].ID, chain[:1+rng.IntN(blocks)])
	}
	dst := make([]int, replicas)
	r := testing.Benchmark(func(b *testing.B) {
		b.Helper()
		b.ReportAllocs()
		for range b.N {
			if err := m.Match(context.Background(), chain, holders, dst); err != nil {
				b.Fatal(err)
			}
		}
	})
	fmt.Printf("lookup/memory/%dx%d %.2f us\n", blocks, replicas, float64(r.T.Nanoseconds())/float64(r.N)/1000)
}
