// Command bench-tokens runs the benchmarks of internal/tokenize on one core and prints a line `name value unit` for each
// figure: the speed of HuggingFace's encoder, of fastokens and of the chunk cache, and their allocations.
//
//	go run ./scripts/bench-tokens [-time 300ms] [-tokenizer qwen3]
package main

import (
	"bufio"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

func main() {
	os.Exit(run())
}

func run() int {
	benchTime := flag.String("time", "300ms", "time, or number of runs with an x, for each figure")
	tokenizer := flag.String("tokenizer", "qwen3", "a tokenizer of scripts/tokenizers.sh")
	flag.Parse()
	cmd := exec.Command("go", "test", "./internal/tokenize", "-run", "^$", "-bench", "^BenchmarkEncode$", "-benchtime", *benchTime, "-count", "1") //nolint:gosec,noctx // a developer's own arguments; it ends with this program
	cmd.Env = append(os.Environ(),
		"GOMAXPROCS=1", "RAYON_NUM_THREADS=1", "TOKENIZERS_PARALLELISM=false", // one core each
		"PREFIXGATE_BENCH_TOKENIZER="+*tokenizer,
		"CI=1", // a missing tokenizer is an error, not a skip
	)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-tokens:", err)
		return 1
	}
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "bench-tokens:", err)
		return 1
	}
	figures := 0
	var rest []string
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		name, values, ok := parse(lines.Text())
		if !ok {
			rest = append(rest, lines.Text())
			continue
		}
		fmt.Fprintf(os.Stdout, "%s %s MB/s\n", name, values["MB/s"])
		fmt.Fprintf(os.Stdout, "%s/allocs %s allocs/op\n", name, values["allocs/op"])
		fmt.Fprintf(os.Stdout, "%s/bytes %s B/op\n", name, values["B/op"])
		figures++
	}
	if err := cmd.Wait(); err != nil || figures == 0 {
		fmt.Fprintln(os.Stderr, strings.Join(rest, "\n"))
		fmt.Fprintf(os.Stderr, "bench-tokens: %d figures, %v\n", figures, err)
		return 1
	}
	return 0
}

// parse reads a line of go test -bench, such as
// "BenchmarkEncode/hf/new/8KB-1  50  2600000 ns/op  3.15 MB/s  8200 B/op  2 allocs/op".
func parse(line string) (name string, values map[string]string, ok bool) {
	fields := strings.Fields(line)
	if len(fields) < 4 || !strings.HasPrefix(fields[0], "BenchmarkEncode/") {
		return "", nil, false
	}
	name = "encode/" + strings.TrimPrefix(fields[0], "BenchmarkEncode/")
	if i := strings.LastIndexByte(name, '-'); i >= 0 {
		name = name[:i]
	}
	values = map[string]string{}
	for i := 2; i+1 < len(fields); i += 2 {
		values[fields[i+1]] = fields[i]
	}
	return name, values, values["MB/s"] != ""
}
