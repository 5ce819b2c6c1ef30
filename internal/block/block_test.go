package block

import (
	"math/rand/v2"
	"testing"
)

func scope() Scope {
	return Scope{Tokenizer: 7, Model: "m", BlockTokens: 16}
}

func tokens(rng *rand.Rand, n int) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = rng.Uint32N(150_000)
	}
	return ids
}

func commonPrefix[T comparable](a, b []T) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// The property the whole project rests on: chains agree exactly as far as the prompts do, in whole blocks.
func TestChainsAgreeExactlyAsFarAsPromptsDo(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		size := 1 + rng.IntN(40)
		shared := tokens(rng, rng.IntN(300))
		a := append(append([]uint32(nil), shared...), tokens(rng, rng.IntN(100))...)
		b := append(append([]uint32(nil), shared...), tokens(rng, rng.IntN(100))...)
		root := Scope{BlockTokens: size}.Root()
		ca := AppendChain(nil, root, a, size, nil)
		cb := AppendChain(nil, root, b, size, nil)
		if len(ca) != len(a)/size {
			t.Fatalf("chain of %d tokens in blocks of %d has %d hashes, want %d", len(a), size, len(ca), len(a)/size)
		}
		if got, want := commonPrefix(ca, cb), commonPrefix(a, b)/size; got != min(want, len(ca), len(cb)) {
			t.Fatalf("chains share %d blocks of %d tokens, prompts share %d", got, size, want)
		}
	}
}

func TestScopesNeverMeet(t *testing.T) {
	base := scope()
	others := []Scope{
		{Tokenizer: 8, Model: "m", BlockTokens: 16},
		{Tokenizer: 7, Model: "n", BlockTokens: 16},
		{Tokenizer: 7, Model: "m", BlockTokens: 32},
		{Tokenizer: 7, Model: "m", Adapter: "a", BlockTokens: 16},
		{Tokenizer: 7, Model: "m", Salt: "a", BlockTokens: 16},
		{Tokenizer: 7, Model: "ma", BlockTokens: 16},
		{Tokenizer: 7, Model: "", Adapter: "m", BlockTokens: 16},
	}
	seen := map[Hash]Scope{base.Root(): base}
	for _, s := range others {
		if prev, ok := seen[s.Root()]; ok {
			t.Errorf("scopes %+v and %+v have one root", prev, s)
		}
		seen[s.Root()] = s
	}
}

// A change of these values means that gateways of two versions no longer understand each other's entries: raise
// schemaVersion with it.
func TestChainIsStableAcrossVersions(t *testing.T) {
	ids := make([]uint32, 40)
	for i := range ids {
		ids[i] = uint32(i * 31)
	}
	got := AppendChain(nil, scope().Root(), ids, 16, []Mark{{Token: 20, Digest: 5}})
	want := []Hash{0x6988da0d857726b, 0x2f1a6820ffe341e3}
	if len(got) != len(want) || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("chain = %#x, want %#x", got, want)
	}
}

func TestMarksChangeTheirBlockAndAllAfter(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	ids := tokens(rng, 160)
	root := scope().Root()
	plain := AppendChain(nil, root, ids, 16, nil)
	for range 200 {
		at := rng.IntN(len(ids))
		one := AppendChain(nil, root, ids, 16, []Mark{{Token: at, Digest: 1}})
		two := AppendChain(nil, root, ids, 16, []Mark{{Token: at, Digest: 2}})
		moved := AppendChain(nil, root, ids, 16, []Mark{{Token: at ^ 1, Digest: 1}})
		for _, other := range [][]Hash{plain, two, moved} {
			if got := commonPrefix(one, other); got != at/16 {
				t.Fatalf("a mark at token %d leaves %d blocks equal, want %d", at, got, at/16)
			}
		}
	}
}

func TestHittable(t *testing.T) {
	for _, c := range []struct{ n, b, want int }{
		// Observed of vLLM with blocks of 32.
		{32, 32, 0},
		{33, 32, 1},
		{64, 32, 1},
		{70, 32, 2},
		{0, 32, 0},
		{-1, 32, 0},
		{5, 0, 0},
		{1, 1, 0},
		{2, 1, 1},
	} {
		if got := Hittable(c.n, c.b); got != c.want {
			t.Errorf("Hittable(%d, %d) = %d, want %d", c.n, c.b, got, c.want)
		}
	}
}

func TestInvalidBlockSizeGivesNoBlocks(t *testing.T) {
	for _, size := range []int{0, -16} {
		if got := AppendChain(nil, 1, make([]uint32, 64), size, nil); len(got) != 0 {
			t.Errorf("AppendChain with blocks of %d tokens = %d hashes, want none", size, len(got))
		}
	}
}

func TestAppendChainAllocatesNothing(t *testing.T) {
	ids := tokens(rand.New(rand.NewPCG(5, 6)), 8192)
	dst := make([]Hash, 0, 512)
	marks := []Mark{{Token: 100, Digest: 9}}
	if n := testing.AllocsPerRun(20, func() { AppendChain(dst, 1, ids, 16, marks) }); n != 0 {
		t.Errorf("AppendChain allocates %v times, want 0", n)
	}
}

func BenchmarkAppendChain(b *testing.B) {
	for _, n := range []int{1 << 10, 8 << 10, 64 << 10} {
		b.Run(map[int]string{1 << 10: "1k", 8 << 10: "8k", 64 << 10: "64k"}[n], func(b *testing.B) {
			ids := tokens(rand.New(rand.NewPCG(7, 8)), n)
			dst := make([]Hash, 0, n/16)
			b.ReportAllocs()
			b.SetBytes(int64(4 * n))
			for b.Loop() {
				AppendChain(dst, 1, ids, 16, nil)
			}
		})
	}
}
