package route

import "math"

// leastLoad picks the candidate with the fewest requests in flight for its weight; chance decides among equals.
type leastLoad struct {
	ties *sequence
}

func newLeastLoad(o Options) *leastLoad { return &leastLoad{ties: newSequence(o)} }

func (p *leastLoad) cost(_ *Request, c *Candidate, _ *survey) float64 {
	return float64(c.load()) / c.weight()
}

func (p *leastLoad) pick(req *Request, candidates []Candidate, s survey) Decision {
	i := pickLeastLoaded(req, candidates, &s, p.ties.next())
	return Decision{Index: i, Reason: ReasonLoad}
}

// pickLeastLoaded returns the allowed candidate with the least load; key breaks ties.
func pickLeastLoaded(req *Request, candidates []Candidate, s *survey, key uint64) int {
	best, bestLoad := -1, math.Inf(1)
	tie := tieBreak{key: key}
	for i := range candidates {
		c := &candidates[i]
		if !s.allows(req, c) {
			continue
		}
		load := float64(c.load()) / c.weight()
		switch {
		case best < 0 || load < bestLoad:
			best, bestLoad = i, load
			tie.start(i)
		case load == bestLoad:
			best = tie.next(candidates, i)
		}
	}
	return best
}
