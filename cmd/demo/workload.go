package main

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// workload is everything the clients of a demonstration will do, fixed in advance so that both halves do the same.
type workload struct {
	systems       []string
	conversations []conversation
}

// conversation is what one client says, turn by turn.
type conversation struct {
	// system is the index of the system prompt, which it shares with others.
	system int
	// begin is when it starts, after the start of the half.
	begin time.Duration
	turns []turn
}

// turn is one question and how long the client thinks before it asks.
type turn struct {
	question  string
	think     time.Duration
	maxTokens int
}

// shape says how large a workload is.
type shape struct {
	seed              uint64
	clients, turns    int
	systems           int
	systemWords       int
	questionWords     int
	answerTokens      int
	meanThink, rampUp time.Duration
}

// vocabulary is what prompts are made of; most of it is one token a word.
const vocabulary = `the of and to in is that it was for on are as with they at be this from have or by one had not but what all
were when we there can an your which their if do will each about how up out them then she many some so these would other into has
more two like him see time could no make than first been its who now people my made over did down only way find use may water long
little very after words called just where most know get through back much before go good new write our used me man too any day same
right look think also around another came come work three word must because does part even place well such here take why things help
put years different away again off went old number great tell men say small every found still between name should home big give air
line set own under read last never us left end along while might next sound below saw something thought both few those always looked
show large often together asked house world going want school important until form food keep children feet land side without once
life enough took sometimes four head above kind began almost live page got earth need far hand high year mother light country father
let night following picture being study second soon story since white days ever paper hard near sentence better best across during
today however sure means knew try told young sun thing whole hear example heard several change answer room sea against top turned
learn point city play toward five using himself usually`

// prose makes up sentences of n words altogether.
func prose(rng *rand.Rand, n int) string {
	words := strings.Fields(vocabulary)
	var b strings.Builder
	inSentence := 0
	for i := range n {
		w := words[rng.IntN(len(words))]
		if inSentence == 0 {
			w = strings.ToUpper(w[:1]) + w[1:]
		}
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(w)
		inSentence++
		if i == n-1 || inSentence > 6 && rng.IntN(8) == 0 {
			b.WriteByte('.')
			inSentence = 0
		}
	}
	return b.String()
}

// newWorkload makes the same workload from the same shape, always.
func newWorkload(s shape) workload {
	rng := rand.New(rand.NewPCG(s.seed, 0x64656d6f))
	var w workload
	for i := range s.systems {
		// Between two thirds and four thirds of the mean, by rules of different lengths.
		n := s.systemWords*2/3 + rng.IntN(s.systemWords*2/3+1)
		var b strings.Builder
		fmt.Fprintf(&b, "You are assistant number %d of this house. Keep to these rules.\n", i+1)
		for rule := 1; n > 0; rule++ {
			length := min(n, 20+rng.IntN(60))
			n -= length
			fmt.Fprintf(&b, "%d. %s\n", rule, prose(rng, length))
		}
		w.systems = append(w.systems, b.String())
	}
	for c := range s.clients {
		conv := conversation{
			// Some prompts are asked for more often than others, as in life.
			system: min(rng.IntN(s.systems), rng.IntN(s.systems)),
			begin:  time.Duration(float64(s.rampUp) * float64(c) / float64(s.clients)),
		}
		for range s.turns {
			conv.turns = append(conv.turns, turn{
				question:  prose(rng, s.questionWords/2+rng.IntN(s.questionWords+1)),
				think:     s.meanThink/2 + time.Duration(rng.Int64N(int64(s.meanThink)+1)),
				maxTokens: s.answerTokens/2 + rng.IntN(s.answerTokens+1),
			})
		}
		w.conversations = append(w.conversations, conv)
	}
	return w
}

// requests is the number of requests in the workload.
func (w *workload) requests() int {
	n := 0
	for i := range w.conversations {
		n += len(w.conversations[i].turns)
	}
	return n
}
