package route

import (
	"math"

	"github.com/cespare/xxhash/v2"

	"prefixgate/internal/replica"
)

// mix scrambles x: a bijection in which every bit of the result depends on every bit of x (the finalizer of splitmix64).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// rendezvous is the rank of a replica for a key: the replica with the highest rank gets the key, and when it goes only its
// own keys move. A replica of twice the weight gets twice the keys. Only the address is hashed: the same place gets the same
// prefixes back after a restart, and two gateways agree even while one of them does not yet know of it.
func rendezvous(key uint64, id *replica.ID, weight float64) float64 {
	h := mix(key ^ xxhash.Sum64String(id.Addr))
	u := (float64(h>>11) + 0.5) / (1 << 53) // In (0, 1).
	return -weight / math.Log(u)
}

// displacement is rendezvous turned into a cost: the higher the rank, the nearer to 0; never above 1.
func displacement(key uint64, c *Candidate) float64 {
	return 1 - math.Exp(-1/rendezvous(key, &c.ID, c.weight()))
}

// tieBreak keeps the first of equals by rendezvous rank for a key. Ranks are computed only once there are two.
type tieBreak struct {
	key   uint64
	ties  int // How many are equal.
	first int
	rank  float64
}

// start begins anew with candidate i as the only best.
func (t *tieBreak) start(i int) {
	t.first, t.ties, t.rank = i, 1, 0
}

// next adds candidate i as equal to the best and returns which of them goes first.
func (t *tieBreak) next(candidates []Candidate, i int) int {
	if t.ties == 1 {
		t.rank = rendezvous(t.key, &candidates[t.first].ID, candidates[t.first].weight())
	}
	t.ties++
	if rank := rendezvous(t.key, &candidates[i].ID, candidates[i].weight()); rank > t.rank {
		t.first, t.rank = i, rank
	}
	return t.first
}

// The hashes below are what a gateway fills a Request with. All are the same in every process, none can be turned back into
// what was hashed, and none is ever 0, which stands for "none".

// HashSession returns the hash of a client's session key; 0 for an empty one.
func HashSession(key string) uint64 {
	if key == "" {
		return 0
	}
	return nonzero(xxhash.Sum64String(key))
}

// HashText returns the hash of the first characters (code points) of text; 0 if there are none.
func HashText(text string, characters int) uint64 {
	if text == "" || characters < 1 {
		return 0
	}
	end, n := len(text), 0
	for i := range text {
		if n == characters {
			end = i
			break
		}
		n++
	}
	return nonzero(xxhash.Sum64String(text[:end]))
}

// HashTokens returns the hash of the first n tokens; 0 if there are none.
func HashTokens(tokens []uint32, n int) uint64 {
	tokens = tokens[:max(0, min(n, len(tokens)))]
	if len(tokens) == 0 {
		return 0
	}
	h := uint64(len(tokens))
	for _, t := range tokens {
		h = mix(h ^ uint64(t))
	}
	return nonzero(h)
}

// shingle is how many consecutive tokens are one feature of SimHashOf.
const shingle = 4

// SimHashOf returns a locality-sensitive hash of the first n tokens: prompts that share most runs of four tokens differ in few
// of its 64 bits. It is 0 if there are no tokens.
func SimHashOf(tokens []uint32, n int) uint64 {
	tokens = tokens[:max(0, min(n, len(tokens)))]
	if len(tokens) == 0 {
		return 0
	}
	var votes [64]int32
	for i := range max(1, len(tokens)-shingle+1) {
		h := uint64(0)
		for _, t := range tokens[i:min(i+shingle, len(tokens))] {
			h = mix(h ^ uint64(t))
		}
		for b := range votes {
			votes[b] += int32(h>>b&1)*2 - 1
		}
	}
	h := uint64(0)
	for b, v := range votes {
		if v > 0 {
			h |= 1 << b
		}
	}
	return nonzero(h)
}

func nonzero(h uint64) uint64 { return max(h, 1) }
