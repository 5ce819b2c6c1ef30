package route

// bound says when a replica carries too much for a key to stay with it: consistent hashing with bounded load.
type bound struct {
	factor  float64 // Of the mean load; 0 means no bound.
	minLoad int     // Up to this load a replica is never over.
}

// over says whether one more request puts c over its bound.
func (b bound) over(c *Candidate, s *survey) bool {
	if b.factor == 0 {
		return false
	}
	load := float64(c.load() + 1)
	share := float64(s.load+1) * c.weight() / s.weight
	return load > float64(b.minLoad) && load > b.factor*share
}

// cost ranks candidates for a key: those within the bound from 0 to 1, those over it from 1 to 2.
func (b bound) cost(key uint64, c *Candidate, s *survey) float64 {
	cost := displacement(key, c)
	if b.over(c, s) {
		cost++
	}
	return cost
}

// pick returns the candidate that ranks first for the key among those within the bound, or among all if none is within.
// spilled says that it is not the key's first choice.
func (b bound) pick(req *Request, candidates []Candidate, s *survey, key uint64) (index int, spilled bool) {
	home, pick := -1, -1
	var homeRank, pickRank float64
	for i := range candidates {
		c := &candidates[i]
		if !s.allows(req, c) {
			continue
		}
		rank := rendezvous(key, &c.ID, c.weight())
		if home < 0 || rank > homeRank {
			home, homeRank = i, rank
		}
		if (pick < 0 || rank > pickRank) && !b.over(c, s) {
			pick, pickRank = i, rank
		}
	}
	if pick < 0 {
		pick = home
	}
	return pick, pick != home
}

// session keeps each client's session on one replica; requests without a session key are routed by least-ttft.
type session struct {
	bound    bound
	fallback *leastTTFT
}

func newSession(o Options) *session {
	return &session{
		bound:    bound{factor: or(o.Session.MaxLoadFactor, 2), minLoad: or(o.Session.MinLoad, 16)},
		fallback: newLeastTTFT(o),
	}
}

func (p *session) cost(req *Request, c *Candidate, s *survey) float64 {
	if req.Session == 0 {
		return p.fallback.cost(req, c, s)
	}
	return p.bound.cost(req.Session, c, s)
}

func (p *session) pick(req *Request, candidates []Candidate, s survey) Decision {
	if req.Session == 0 {
		return p.fallback.pick(req, candidates, s)
	}
	return keyed(p.bound, req, candidates, &s, req.Session, ReasonSession)
}

// prefixHash keeps prompts that begin alike on one replica within a bound of its load; prompts without a beginning to hash
// are routed by least-load.
type prefixHash struct {
	bound    bound
	fallback *leastLoad
}

func newPrefixHash(o Options) *prefixHash {
	return &prefixHash{bound: bound{factor: or(o.PrefixHash.LoadFactor, 1.25)}, fallback: newLeastLoad(o)}
}

func (p *prefixHash) cost(req *Request, c *Candidate, s *survey) float64 {
	if req.TextPrefix == 0 {
		return p.fallback.cost(req, c, s)
	}
	return p.bound.cost(req.TextPrefix, c, s)
}

func (p *prefixHash) pick(req *Request, candidates []Candidate, s survey) Decision {
	if req.TextPrefix == 0 {
		return p.fallback.pick(req, candidates, s)
	}
	return keyed(p.bound, req, candidates, &s, req.TextPrefix, ReasonHash)
}

// keyed is the decision of a policy that goes by a key.
func keyed(b bound, req *Request, candidates []Candidate, s *survey, key uint64, reason Reason) Decision {
	i, spilled := b.pick(req, candidates, s, key)
	if spilled {
		reason = ReasonSpread
	}
	return Decision{Index: i, Reason: reason}
}
