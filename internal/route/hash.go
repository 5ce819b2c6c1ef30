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

// tieBreak keeps the best of equals. With a key it is the highest rendezvous rank, the same on every gateway; without one
// every tie would go to the same replica, so a counter stands for the key.
type tieBreak struct {
	key  uint64
	rank float64
}

// better says whether c goes before the best so far.
func (t *tieBreak) better(c *Candidate) bool {
	rank := rendezvous(t.key, &c.ID, c.weight())
	if rank > t.rank {
		t.rank = rank
		return true
	}
	return false
}
