package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// process is a program that the demonstration started and will end.
type process struct {
	name string
	cmd  *exec.Cmd
	// addr gets the address that the program says it listens on; closed when its output ends.
	addr chan string
	// exited is closed when it has ended.
	exited chan struct{}

	// mu guards tail.
	mu sync.Mutex
	// tail are the last lines of its log, shown if it fails.
	tail []string
}

// tailLines is how much of a failed program's log is shown.
const tailLines = 12

// graceful is how long a program may take to end when asked to.
const graceful = 3 * time.Second

// listens finds the address in a program's log, text or JSON.
var listens = regexp.MustCompile(`(?:replica|gateway) listens.*?\baddr"?[=:]"?([^\s",]+)`)

// fleet are the programs that run; stop ends them all.
type fleet struct {
	bin       string
	log       io.Writer // nil: their logs are not shown
	processes []*process
}

// start starts a program out of the folder of programs. It must be called from the main goroutine, see main.
func (f *fleet) start(name, program string, args ...string) (*process, error) {
	p := &process{name: name, addr: make(chan string, 1), exited: make(chan struct{})}
	p.cmd = exec.Command(filepath.Join(f.bin, program), args...) //nolint:noctx // ended by stop, in order and with grace
	// In a group of its own, so that Ctrl-C reaches only the demonstration, which then ends them in order.
	p.cmd.SysProcAttr = processAttributes()
	out, err := p.cmd.StderrPipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	f.processes = append(f.processes, p)
	go p.watch(out, f.log)
	return p, nil
}

// watch reads the program's log until it ends.
func (p *process) watch(out io.Reader, log io.Writer) {
	defer close(p.addr)
	defer close(p.exited) // first: who sees that there is no address may look whether the program has ended
	lines := bufio.NewScanner(out)
	found := false
	for lines.Scan() {
		line := lines.Text()
		if m := listens.FindStringSubmatch(line); m != nil && !found {
			found = true
			p.addr <- m[1]
		}
		if log != nil {
			fmt.Fprintf(log, "[%s] %s\n", p.name, line)
		}
		p.mu.Lock()
		p.tail = append(p.tail, line)
		if len(p.tail) > tailLines {
			p.tail = slices.Delete(p.tail, 0, 1)
		}
		p.mu.Unlock()
	}
	p.cmd.Wait() //nolint:errcheck // a program that was ended by a signal is no error here
}

// address waits for the program to listen and returns its base URL.
func (p *process) address(ctx context.Context) (string, error) {
	select {
	case <-ctx.Done():
		return "", fmt.Errorf("%s does not listen: %w\n%s", p.name, ctx.Err(), p.lastWords())
	case addr, ok := <-p.addr:
		if !ok {
			return "", fmt.Errorf("%s ended before it listened\n%s", p.name, p.lastWords())
		}
		return "http://" + addr, nil
	}
}

func (p *process) lastWords() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return "    " + strings.Join(p.tail, "\n    ")
}

// stop asks all programs to end, last started first, and ends those that do not. It returns when none is left.
func (f *fleet) stop() {
	for _, p := range slices.Backward(f.processes) {
		p.cmd.Process.Signal(syscall.SIGTERM) //nolint:errcheck // it may have ended by itself
	}
	timeout := time.After(graceful)
	for _, p := range f.processes {
		select {
		case <-p.exited:
			continue
		case <-timeout:
		}
		for _, p := range f.processes {
			p.cmd.Process.Kill() //nolint:errcheck // it may have ended by itself
		}
		break
	}
	for _, p := range f.processes {
		<-p.exited
	}
	f.processes = nil
}

// failed returns an error if a program has ended although nobody asked it to.
func (f *fleet) failed() error {
	for _, p := range f.processes {
		select {
		case <-p.exited:
			return fmt.Errorf("%s ended unexpectedly\n%s", p.name, p.lastWords())
		default:
		}
	}
	return nil
}

// ready waits until GET url answers 200.
func ready(ctx context.Context, client *http.Client, url string) error {
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		res, err := client.Do(req)
		if err == nil {
			res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return nil
			}
		}
		if !pause(ctx, 20*time.Millisecond) {
			return fmt.Errorf("%s is not ready: %w", url, ctx.Err())
		}
	}
}

// programs returns the folder that holds all the programs: the given one, else that of this program.
func programs(bin string, names ...string) (string, error) {
	if bin == "" {
		self, err := os.Executable()
		if err != nil {
			return "", fmt.Errorf("find the folder of programs: %w", err)
		}
		bin = filepath.Dir(self)
	}
	for _, name := range names {
		if _, err := os.Stat(filepath.Join(bin, name)); err != nil {
			return "", fmt.Errorf("the program %s is not in %s: run make build, or name its folder with -bin", name, bin)
		}
	}
	return bin, nil
}
