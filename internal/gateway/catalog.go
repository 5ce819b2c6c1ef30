package gateway

import (
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"prefixgate/internal/replica"
)

// maxModelLabels bounds how many served models get a value of their own in metrics. Configured ones always do.
const maxModelLabels = 200

// The values of the label model for what has no name of its own.
const (
	labelOther = "other" // a model that is neither configured nor served, or one too many
	labelNone  = "none"  // the request names no model
)

// catalog is what the fleet serves at one time, by the names that clients use. It is built anew when a replica's list of
// models changes, and never changed.
type catalog struct {
	stamps []modelStamp
	served map[string]servedModel
	// only is the base model if the fleet serves just one; empty otherwise.
	only string
	// silent says that some replica has not told its models.
	silent bool
}

// servedModel is one name of the catalog.
type servedModel struct {
	// base is the name under which prompts of the model are kept apart from others': the first of the names that one model
	// is served under. For an adapter it is the base model's.
	base string
	// adapter is the adapter's name; empty for a base model.
	adapter string
	// root is where the engine loaded the base model from; empty if it does not tell.
	root string
	// label is the value of metric labels.
	label string
}

// modelStamp tells two readings of a replica's models apart: each is another slice.
type modelStamp struct {
	first *replica.Model
	n     int
}

func stampOf(s *replica.Snapshot) modelStamp {
	return modelStamp{unsafe.SliceData(s.Models), len(s.Models)}
}

// catalogs keeps the current catalog.
type catalogs struct {
	current atomic.Pointer[catalog]
	mu      sync.Mutex // Held while a new one is built.
	// configured are names that always have a label of their own.
	configured map[string]bool
}

// of returns the catalog for snapshots of the whole fleet. It allocates only when something changed.
func (c *catalogs) of(snapshots []replica.Snapshot) *catalog {
	if cat := c.current.Load(); cat != nil && cat.fits(snapshots) {
		return cat
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if cat := c.current.Load(); cat != nil && cat.fits(snapshots) {
		return cat
	}
	cat := newCatalog(snapshots, c.configured)
	c.current.Store(cat)
	return cat
}

func (c *catalog) fits(snapshots []replica.Snapshot) bool {
	if len(c.stamps) != len(snapshots) {
		return false
	}
	for i := range snapshots {
		if c.stamps[i] != stampOf(&snapshots[i]) {
			return false
		}
	}
	return true
}

func newCatalog(snapshots []replica.Snapshot, configured map[string]bool) *catalog {
	c := &catalog{served: map[string]servedModel{}}
	bases := map[string]bool{}
	for i := range snapshots {
		s := &snapshots[i]
		c.stamps = append(c.stamps, stampOf(s))
		if len(s.Models) == 0 {
			c.silent = true
		}
		for _, m := range s.Models {
			if m.ID == "" {
				continue
			}
			e := servedModel{base: m.ID, root: m.Root}
			if m.Parent != "" {
				e.base, e.adapter, e.root = m.Parent, m.ID, ""
			}
			// An engine may serve one model under several names, with one cache for all of them.
			for _, other := range s.Models {
				if other.Parent == "" && other.ID == e.base {
					e.root = other.Root
				}
			}
			if e.root != "" {
				for _, other := range s.Models {
					if other.Parent == "" && other.Root == e.root && other.ID < e.base {
						e.base = other.ID
					}
				}
			}
			bases[e.base] = true
			if before, ok := c.served[m.ID]; ok && before.base <= e.base {
				continue
			}
			c.served[m.ID] = e
		}
	}
	names := make([]string, 0, len(c.served))
	for name := range c.served {
		names = append(names, name)
	}
	slices.Sort(names)
	room := maxModelLabels
	for _, name := range names {
		e := c.served[name]
		e.label = name
		if !configured[name] {
			if room--; room < 0 {
				e.label = labelOther
			}
		}
		c.served[name] = e
	}
	if len(bases) == 1 {
		for base := range bases {
			c.only = base
		}
	}
	return c
}

// serves says whether a replica may serve the model of a name: it lists it, or it tells no models at all.
func serves(s *replica.Snapshot, name string) bool {
	if name == "" || len(s.Models) == 0 {
		return true
	}
	for i := range s.Models {
		if s.Models[i].ID == name {
			return true
		}
	}
	return false
}
