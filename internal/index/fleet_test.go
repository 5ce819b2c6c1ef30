package index_test

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"prefixgate/internal/block"
	"prefixgate/internal/index"
	"prefixgate/internal/index/indextest"
	"prefixgate/internal/testenv"
)

// play plays conversations over replicas with caches of endless size: each turn goes to a random gateway, and from there to the
// replica that the gateway believes to hold most of it, a random one if none does. It returns which part of the prompts' blocks
// the replicas really had, and how many turns predicted that part exactly. The clock moves half a second a turn, of which
// conversations have many: seconds pass between the turns of one.
func play(t *testing.T, clock *indextest.Clock, gws []*gateway) (hitRate, exact float64) {
	t.Helper()
	const replicas = 8
	rng := rand.New(rand.NewPCG(41, 41))
	var systems [][]block.Hash
	for range 5 {
		systems = append(systems, indextest.Chain(rng, 20+rng.IntN(100)))
	}
	var open [][]block.Hash
	held := make([]map[block.Hash]bool, replicas)
	for i := range held {
		held[i] = make(map[block.Hash]bool)
	}
	holders := indextest.Holders(replicas)
	dst := make([]int, replicas)
	var hit, total, right, turns int
	for range 900 {
		clock.Advance(500 * time.Millisecond)
		// A new conversation, or the next turn of one of 30.
		i := len(open)
		if i < 30 {
			s := systems[rng.IntN(len(systems))]
			open = append(open, indextest.Fork(rng, s, len(s), len(s)+1+rng.IntN(30)))
		} else {
			i = rng.IntN(len(open))
			c := open[i]
			keep := len(c)
			switch {
			case len(c) > 400:
				s := systems[rng.IntN(len(systems))]
				c, keep = s, len(s) // it ends, another begins
			case rng.IntN(10) == 0:
				keep = len(c) / 2 // the user edits an earlier message
			}
			open[i] = indextest.Fork(rng, c, keep, keep+1+rng.IntN(30))
		}
		c := open[i]
		g := gws[rng.IntN(len(gws))]
		if err := g.Match(t.Context(), c, holders, dst); err != nil {
			t.Fatal(err)
		}
		best := rng.IntN(replicas)
		for r, n := range dst {
			if n > dst[best] {
				best = r
			}
		}
		n := 0
		for n < len(c) && held[best][c[n]] {
			n++
		}
		hit += n
		total += len(c)
		turns++
		if n == dst[best] {
			right++
		}
		for _, h := range c {
			held[best][h] = true
		}
		g.Record(indextest.ID(best), c)
		flush(t, g.Redis)
	}
	return float64(hit) / float64(total), float64(right) / float64(turns)
}

// Elsewhere each gateway has its own view: with four of them, a conversation finds its replica one time in four.
func TestFourGatewaysHitLikeOne(t *testing.T) {
	t.Parallel()
	single := testenv.StartRedis(t)
	cluster := testenv.StartCluster(t)
	for name, address := range map[string]string{
		"single":  "redis://" + single.Addr,
		"cluster": "redis-cluster://" + strings.Join(cluster.Addrs(), ","),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rate := func(gateways int) float64 {
				flushAll(t, open(t, address))
				clock := indextest.NewClock()
				var gws []*gateway
				for range gateways {
					// The defaults, but for time enough.
					gws = append(gws, newGateway(t, address, patient(index.Options{Clock: clock.Now, NearCacheStaleness: time.Second})))
				}
				hitRate, exact := play(t, clock, gws)
				t.Logf("%d gateways: hit rate %.4f, predicted exactly %.4f", gateways, hitRate, exact)
				return hitRate
			}
			one := rate(1)
			four := rate(4)
			if one < 0.5 {
				t.Errorf("one gateway's hit rate is %.3f: this tests nothing", one)
			}
			if four < 0.98*one {
				t.Errorf("hit rate of four gateways is %.4f, want at least 0.98 of one's %.4f", four, one)
			}
		})
	}
}

// Two gateways; one is restarted and knows at once what it knew.
func TestARestartedGatewayKnows(t *testing.T) {
	t.Parallel()
	address := "redis://" + testenv.Redis(t)
	a := newGateway(t, address, index.Options{})
	rng := rand.New(rand.NewPCG(42, 42))
	c := indextest.Chain(rng, 100)
	a.Record(indextest.ID(2), c)
	a.Close() // writes what is queued
	b := newGateway(t, address, index.Options{})
	dst := make([]int, 3)
	if err := b.Match(t.Context(), c, indextest.Holders(3), dst); err != nil || dst[2] != 100 {
		t.Errorf("the first Match of a restarted gateway = %v, %v, want 100 on replica 2", dst, err)
	}
}

// What one gateway forgets, the others soon do too; what is recorded after counts everywhere.
func TestForgettingSpreads(t *testing.T) {
	t.Parallel()
	address := "redis://" + testenv.Redis(t)
	a, b := newGateway(t, address, index.Options{}), newGateway(t, address, index.Options{})
	rng := rand.New(rand.NewPCG(43, 43))
	c := indextest.Chain(rng, 100)
	dst := make([]int, 1)
	finds := func(g *gateway, want int) func() bool {
		return func() bool {
			return g.Match(t.Context(), c, indextest.Holders(1), dst) == nil && dst[0] == want
		}
	}
	a.Record(indextest.ID(0), c)
	b.Record(indextest.ID(0), c)
	flush(t, a.Redis)
	flush(t, b.Redis)
	a.Forget(indextest.ID(0))
	if !finds(a, 0)() {
		t.Errorf("after Forget, Match on the same gateway = %v, want 0", dst)
	}
	eventually(t, "forgetting on the other gateway", finds(b, 0))
	b.Record(indextest.ID(0), c[:30])
	flush(t, b.Redis)
	eventually(t, "new record on the first gateway", finds(a, 30))
}
