package route

import (
	"math/bits"

	"github.com/cespare/xxhash/v2"
)

// simHash sends similar prompts to one replica: each replica is a point among the 64-bit hashes, fixed by its address, and a
// prompt goes to the point from which its locality-sensitive hash differs in the fewest bits.
type simHash struct {
	bound    bound
	fallback *leastLoad
}

func newSimHash(o Options) *simHash {
	return &simHash{bound: bound{factor: or(o.SimHash.LoadFactor, 1.25)}, fallback: newLeastLoad(o)}
}

// distance orders the candidates for a hash by the bits in which it differs from their points. Many differ in equally many: the
// fraction makes the order total and the same on every gateway.
func distance(hash uint64, c *Candidate) float64 {
	point := mix(xxhash.Sum64String(c.ID.Addr))
	return float64(bits.OnesCount64(hash^point)) + unit(point)
}

func (p *simHash) cost(req *Request, c *Candidate, s *survey) float64 {
	if req.SimHash == 0 {
		return p.fallback.cost(req, c, s)
	}
	cost := distance(req.SimHash, c)
	if p.bound.over(c, s) {
		cost += 65
	}
	return cost
}

func (p *simHash) pick(req *Request, candidates []Candidate, s survey) Decision {
	if req.SimHash == 0 {
		return p.fallback.pick(req, candidates, s)
	}
	home, pick := -1, -1
	var homeAt, pickAt float64
	for i := range candidates {
		c := &candidates[i]
		if !s.allows(req, c) {
			continue
		}
		at := distance(req.SimHash, c)
		if home < 0 || at < homeAt {
			home, homeAt = i, at
		}
		if (pick < 0 || at < pickAt) && !p.bound.over(c, &s) {
			pick, pickAt = i, at
		}
	}
	d := Decision{Index: pick, Reason: ReasonHash}
	switch {
	case pick < 0:
		d.Index = home
	case pick != home:
		d.Reason = ReasonSpread
	}
	return d
}
