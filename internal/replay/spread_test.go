package replay

import (
	"math/rand/v2"
	"testing"
	"time"

	"prefixgate/internal/route"
)

// list is a workload given as a slice, with blocks of 16 tokens.
func list(requests []Request) *Trace {
	return &Trace{Requests: requests, blockTokens: 16}
}

// prompt is a request for a prompt made of segments.
func prompt(at time.Duration, output int, session uint64, segments ...segment) Request {
	r := Request{At: at, OutputTokens: output, Session: session, Chain: chainOf(nil, segments, 16), SimHash: simHashOf(segments)}
	for _, s := range segments {
		r.PromptTokens += s.tokens
	}
	r.TextPrefix = prefixOf(r.Chain, 16)
	return r
}

// recorder is a policy that remembers what it picked.
type recorder struct {
	route.Policy
	picks *[]int
}

func (r recorder) Pick(req *route.Request, candidates []route.Candidate) (route.Decision, bool) {
	d, ok := r.Policy.Pick(req, candidates)
	*r.picks = append(*r.picks, d.Index)
	return d, ok
}

// picks runs requests and returns the result and which replica each went to.
func picks(t *testing.T, requests []Request, policy route.Options, opts Options) (*Result, []int) {
	t.Helper()
	load := list(requests).Open()
	w, err := newWorld(load, policy, opts.withDefaults())
	if err != nil {
		t.Fatal(err)
	}
	var got []int
	for i, p := range w.policies {
		w.policies[i] = recorder{p, &got}
	}
	r, err := w.run(t.Context(), load)
	if err != nil {
		t.Fatal(err)
	}
	return r, got
}

// Elsewhere a shared system prompt sends everything to one replica while the others idle. 90 % of 100 requests per second share a
// prompt of 4,000 tokens and are served for a second each; the others are conversations, which must stay where they are.
func TestHotPrefixSpreadsAndOthersStay(t *testing.T) {
	for _, gateways := range []int{1, 4} {
		rng := rand.New(rand.NewPCG(1, uint64(gateways)))
		var requests []Request
		turns := make(map[uint64][]segment)
		for i := range 12_000 {
			at := time.Duration(i) * 10 * time.Millisecond
			if rng.IntN(10) > 0 {
				requests = append(requests, prompt(at, 50, 0, segment{1, 4000}, segment{uint64(i) + 1e6, 100}))
				continue
			}
			s := 1 + rng.Uint64N(40)
			if len(turns[s]) == 0 {
				turns[s] = []segment{{mix(s), 3000}}
			}
			turns[s] = append(turns[s], segment{uint64(i) + 1e9, 60})
			requests = append(requests, prompt(at, 50, s, turns[s]...))
		}
		opts := Options{Replicas: 4, CacheBlocks: 60_000, DecodeRate: 50, Gateways: gateways, Seed: 1}
		if gateways > 1 {
			opts.Staleness = 100 * time.Millisecond
		}
		r, where := picks(t, requests, route.Options{}, opts)
		if r.LoadImbalance > 1.3 || r.RequestImbalance > 1.3 {
			t.Errorf("%d gateways: max/mean = %.2f in flight and %.2f requests, want at most 1.3", gateways, r.LoadImbalance, r.RequestImbalance)
		}
		last := make(map[uint64]int)
		moved, stayed := 0, 0
		for i, q := range requests {
			if q.Session == 0 {
				continue
			}
			if before, ok := last[q.Session]; ok && before != where[i] {
				moved++
			} else if ok {
				stayed++
			}
			last[q.Session] = where[i]
		}
		// Gateways that hear of each other late see more imbalance than there is.
		if limit := map[int]int{1: 20, 4: 4}[gateways]; moved*limit > stayed {
			t.Errorf("%d gateways: conversations changed their replica %d times and stayed %d times, want at most 1 in %d to change", gateways, moved, stayed, limit)
		}
		// While the prefix is hot all replicas hold it. When it no longer is, they leave it one after another.
		tail := len(requests)
		for i := range 300 {
			at := requests[tail-1].At + 10*time.Second + time.Duration(i)*time.Second
			requests = append(requests, prompt(at, 50, 0, segment{1, 4000}, segment{uint64(i) + 2e6, 100}))
		}
		_, where = picks(t, requests, route.Options{ProbeEvery: -1}, opts)
		used := make(map[int]bool)
		for _, i := range where[len(where)-100:] {
			used[i] = true
		}
		if len(used) == opts.Replicas {
			t.Errorf("%d gateways: a prefix that is no longer hot is still served by all replicas", gateways)
		}
	}
}

// Between scrapes every request used to pick the same least loaded replica. 200 requests within one scrape interval, with prompts of
// their own or with a system prompt that one replica holds, must spread evenly over 4 replicas. The hashing policies and random
// are as even as their hashes and draws are, longest-prefix spreads a shared prompt only when its gate opens.
func TestBurstWithinAScrapeIntervalSpreads(t *testing.T) {
	for _, name := range []string{route.LeastTTFT, route.Weighted, route.LongestPrefix, route.LeastLoad, route.PowerOfTwo, route.RoundRobin} {
		for _, shared := range []bool{false, true} {
			if shared && name == route.LongestPrefix {
				continue
			}
			var requests []Request
			if shared {
				requests = append(requests, prompt(0, 1, 0, segment{1, 4000}))
			}
			for i := range 200 {
				at := 10*time.Second + time.Duration(i)*4*time.Millisecond
				beginning := segment{uint64(i) + 10, 4000}
				if shared {
					beginning.id = 1
				}
				requests = append(requests, prompt(at, 200, uint64(i)+1, beginning, segment{uint64(i) + 1e6, 100}))
			}
			_, where := picks(t, requests, route.Options{Policy: name}, Options{
				Replicas: 4, DecodeRate: 50, CacheBlocks: 60_000, ScrapeInterval: time.Hour, Seed: 1,
			})
			var count [4]int
			for _, i := range where[len(where)-200:] {
				count[i]++
			}
			low, high := min(count[0], count[1], count[2], count[3]), max(count[0], count[1], count[2], count[3])
			if low < 40 || high > 60 {
				t.Errorf("%s, shared %v: %v requests, want 40 to 60 each", name, shared, count)
			}
		}
	}
}
