package replay

import "time"

// schedule is a heap of engines by the time of their next step; among equals the lower number goes first.
type schedule struct {
	at   []time.Duration // By engine.
	pos  []int           // By engine: its place in heap, -1 if idle.
	heap []int
}

func newSchedule(n int) *schedule {
	s := &schedule{at: make([]time.Duration, n), pos: make([]int, n)}
	for i := range s.pos {
		s.pos[i] = -1
	}
	return s
}

// min returns the time of the next step.
func (s *schedule) min() (time.Duration, bool) {
	if len(s.heap) == 0 {
		return 0, false
	}
	return s.at[s.heap[0]], true
}

// first returns the engine of the next step.
func (s *schedule) first() int { return s.heap[0] }

// set changes when engine i is due; ok is false if it is idle.
func (s *schedule) set(i int, at time.Duration, ok bool) {
	s.at[i] = at
	p := s.pos[i]
	switch {
	case ok && p < 0:
		p = len(s.heap)
		s.heap = append(s.heap, i)
		s.pos[i] = p
	case !ok && p < 0:
		return
	case !ok:
		last := len(s.heap) - 1
		s.swap(p, last)
		s.heap = s.heap[:last]
		s.pos[i] = -1
		if p == last {
			return
		}
	}
	s.fix(p)
}

func (s *schedule) fix(p int) {
	for p > 0 && s.less(p, (p-1)/2) {
		s.swap(p, (p-1)/2)
		p = (p - 1) / 2
	}
	for {
		c := 2*p + 1
		if c >= len(s.heap) {
			return
		}
		if c+1 < len(s.heap) && s.less(c+1, c) {
			c++
		}
		if !s.less(c, p) {
			return
		}
		s.swap(c, p)
		p = c
	}
}

func (s *schedule) less(p, q int) bool {
	i, j := s.heap[p], s.heap[q]
	if s.at[i] != s.at[j] {
		return s.at[i] < s.at[j]
	}
	return i < j
}

func (s *schedule) swap(p, q int) {
	s.heap[p], s.heap[q] = s.heap[q], s.heap[p]
	s.pos[s.heap[p]], s.pos[s.heap[q]] = p, q
}

// queue is a first-in first-out queue of changes.
type queue struct {
	items []change
	start int
}

func (q *queue) push(c change) { q.items = append(q.items, c) }

func (q *queue) some() bool { return q.start < len(q.items) }

func (q *queue) first() *change { return &q.items[q.start] }

func (q *queue) pop() change {
	c := q.items[q.start]
	q.items[q.start] = change{}
	q.start++
	if q.start > 1024 && q.start > len(q.items)/2 {
		n := copy(q.items, q.items[q.start:])
		clear(q.items[n:])
		q.items, q.start = q.items[:n], 0
	}
	return c
}
