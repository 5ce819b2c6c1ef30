package gateway

import (
	"errors"
	"fmt"
)

// teardown is a stack of what has to be undone. Each thing that is opened puts its end on it on the next line, so that a
// gateway that is only half built unwinds itself. It is not safe for concurrent use.
type teardown struct {
	steps []teardownStep
}

type teardownStep struct {
	name string
	fn   func() error
}

// add puts a step on the stack.
func (t *teardown) add(name string, fn func() error) {
	t.steps = append(t.steps, teardownStep{name, fn})
}

// run takes all steps, the latest first, and returns their errors joined. A second run does nothing.
func (t *teardown) run() error {
	var errs []error
	for len(t.steps) > 0 {
		s := t.steps[len(t.steps)-1]
		t.steps = t.steps[:len(t.steps)-1]
		if err := s.fn(); err != nil {
			errs = append(errs, fmt.Errorf("close %s: %w", s.name, err))
		}
	}
	return errors.Join(errs...)
}
